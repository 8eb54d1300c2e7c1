"""What every TRL worker is given, so that TRL is at its best here: bf16 weights, scaled-dot-product attention, no
autocast, no data-loader workers, no reports, no saving. Runs under the peer's Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig


def training_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Arguments that SFTConfig and GRPOConfig share."""
    return {
        "output_dir": str(Path.cwd() / "trl"),
        "learning_rate": job["learning_rate"],
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch",
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": job["seed"],
        "model_init_kwargs": {"dtype": "bfloat16", "attn_implementation": "sdpa"},
    }


def lora(job: dict[str, Any]) -> LoraConfig:
    return LoraConfig(
        r=job["rank"],
        lora_alpha=job["alpha"],
        lora_dropout=0.0,
        target_modules=job["target_modules"],
        task_type="CAUSAL_LM",
    )


def settings_of(model: torch.nn.Module) -> dict[str, Any]:
    """What the weights, the adapter and the attention really are, as it goes into the report."""
    base = next(p for p in model.parameters() if not p.requires_grad)
    trained = next(p for p in model.parameters() if p.requires_grad)
    return {
        "weights": str(base.dtype),
        "adapter": str(trained.dtype),
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
    }
