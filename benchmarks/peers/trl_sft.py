"""TRL's side of the SFT benchmark: SFTTrainer on rows that are already tokens. Runs under the peer's Python.

Usage: python trl_sft.py JOB.json RESULT.json (see `harness.run_worker`; the job's keys are those of `train`).

What TRL is given besides `trl_settings`: labels ready in the data set (no tokenizing), and one row per micro-batch so
that nothing is padded. TRL 1.16 runs the head in chunks by default ("fused LM head"), which is left on.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import harness
import torch
import trl_settings
from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

IGNORED = -100
MANY_STEPS = 1_000_000


class CountingTrainer(SFTTrainer):
    """SFTTrainer that notes, per optimizer step, how many tokens it processed and took the loss on."""

    tokens = 0
    supervised_tokens = 0

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.tokens += inputs["input_ids"].numel()
        self.supervised_tokens += int((inputs["labels"][:, 1:] != IGNORED).sum())
        return super().training_step(model, inputs, num_items_in_batch)


class Watch(TrainerCallback):
    """Times steps, keeps the adapter of the last step within the time budget, and stops after the budget.

    The loss of a step is known when it is logged, which is after the step's end.
    """

    def __init__(self, budget_seconds: float | None) -> None:
        self.log = harness.StepLog()
        self.budget = budget_seconds
        self.trainer: CountingTrainer | None = None
        self.kept: dict[str, torch.Tensor] = {}
        self.kept_steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.log.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert self.trainer is not None
        self.log.end_step(float("nan"), self.trainer.tokens, self.trainer.supervised_tokens)
        self.trainer.tokens = self.trainer.supervised_tokens = 0
        if self.budget is None:
            return
        if self.log.seconds <= self.budget:
            trained = (pair for pair in model.named_parameters() if pair[1].requires_grad)
            self.kept = {name: parameter.detach().clone() for name, parameter in trained}
            self.kept_steps = state.global_step
        else:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            self.log.steps[-1].loss = float(logs["loss"])


def config(job: dict[str, Any]) -> SFTConfig:
    arguments = trl_settings.training_arguments(job) | {"bf16": job["autocast"]}
    return SFTConfig(
        **arguments,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=job["rows_per_step"],
        max_length=job["max_length"],
        packing=False,
        gradient_checkpointing=job["gradient_checkpointing"],
        max_steps=job["steps"] if job["steps"] is not None else MANY_STEPS,
        train_sampling_strategy="sequential",
        eval_strategy="no",
    )


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train on `rows` in their order, for `steps` or, where that is null, for `seconds`; save to `adapter`."""
    rows = harness.read_rows(Path(job["rows"]))
    labels = [[t if s else IGNORED for t, s in zip(r.tokens, r.supervised, strict=True)] for r in rows]
    began = time.perf_counter()
    watch = Watch(job["seconds"])
    trainer = CountingTrainer(
        model=job["model"],
        args=config(job),
        train_dataset=Dataset.from_dict({"input_ids": [r.tokens for r in rows], "labels": labels}),
        peft_config=trl_settings.lora(job),
        callbacks=[watch],
    )
    if len(trainer.train_dataset) != len(rows):
        raise RuntimeError(f"TRL kept {len(trainer.train_dataset)} of {len(rows)} rows")
    watch.trainer = trainer
    load_seconds = time.perf_counter() - began
    resident = harness.resident_bytes()
    trainer.train()
    peak = harness.peak_resident_bytes()
    if job["adapter"]:
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if name in watch.kept:
                    parameter.copy_(watch.kept[name])
        trainer.model.save_pretrained(job["adapter"])
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    return {
        "versions": harness.versions(*harness.TRL_PACKAGES),
        "settings": trl_settings.settings_of(trainer.model) | {"autocast": job["autocast"]},
        "trainable_parameters": sum(p.numel() for p in trained),
        "load_seconds": load_seconds,
        "steps": watch.log.as_json(),
        "adapter_steps": watch.kept_steps if job["seconds"] is not None else len(watch.log.steps),
        "resident_after_load_bytes": resident,
        "peak_resident_bytes": peak,
    }


if __name__ == "__main__":
    harness.answer(train)
