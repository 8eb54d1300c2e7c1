"""mlx-lm-lora's side of the GRPO benchmark: its `train_grpo` on the same prompts. Runs under the peer's Python.

Usage: python mlx_lm_lora_grpo.py JOB.json RESULT.json (see `harness.run_worker`).

The peer is given float32 weights (its bfloat16 products are 50 times slower on a CPU), rotary settings that mlx-lm
does not read itself, prompts of one length, no top-p or top-k, and a reference that is the model with its adapter off:
the same weights, not a second copy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import mlx.core as mx
import mlx.optimizers as optim
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, load_tokenizer
from mlx_lm_lora.trainer.grpo_trainer import GRPOTrainingArgs, train_grpo
from vowels import share_of_vowels


class Reward:
    """The reward, which also ends a step's measurement at its next call and notes what was sampled."""

    __name__ = "vowels"

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.with_spread: list[float] = []

    def __call__(self, prompts: Any, completions: list[str], answer: Any, types: Any = None) -> list[float]:
        values = [share_of_vowels(text) for text in completions]
        groups = [values[at : at + self.group_size] for at in range(0, len(values), self.group_size)]
        self.with_spread.append(sum(max(group) > min(group) for group in groups) / len(groups))
        return values


class Watch:
    def __init__(self, per_step: int) -> None:
        self.log, self.per_step = harness.StepLog(), per_step
        self.sampled: list[int] = []

    def on_train_loss_report(self, info: dict[str, float]) -> None:
        sampled = round(info["train_average_generated_tokens"] * self.per_step)
        self.log.end_step(info["train_loss"], sampled, sampled)
        self.sampled.append(sampled)

    def on_val_loss_report(self, info: dict[str, float]) -> None:
        pass


def models(job: dict[str, Any]) -> tuple[Any, Any]:
    """(policy with an adapter, reference: the same weights without one)."""
    made = []
    for _ in range(2):
        model, _ = load_model(Path(job["model"]), model_config=job["mlx_model_config"])
        model.set_dtype(mx.float32)
        model.freeze()
        made.append(model)
    policy, reference = made
    reference.update(policy.parameters())  # one copy of the weights in memory
    owner = {name: "self_attn" if name[0] in "qkvo" else "mlp" for name in job["target_modules"]}
    lora = {
        "rank": job["rank"],
        "scale": job["alpha"] / job["rank"],
        "dropout": 0.0,
        "keys": [f"{owner[name]}.{name}" for name in job["target_modules"]],
    }
    linear_to_lora_layers(policy, len(policy.layers), lora)
    mx.eval(policy.parameters())
    return policy, reference


def train(job: dict[str, Any]) -> dict[str, Any]:
    mx.set_default_device(mx.cpu)
    policy, reference = models(job)
    tokenizer = load_tokenizer(Path(job["model"]))
    lines = Path(job["prompts"]).read_text(encoding="utf-8").split("\n")
    dataset = []
    for line in lines:
        if line:
            messages = json.loads(line)["messages"]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            dataset.append((ids, [], messages[-1]["content"], ""))
    reward, watch = Reward(job["group_size"]), Watch(job["group_size"] * job["prompts_per_step"])
    watch.log.begin()
    train_grpo(
        model=policy,
        ref_model=reference,
        tokenizer=tokenizer,
        optimizer=optim.AdamW(job["learning_rate"], weight_decay=0.0, bias_correction=True),
        train_dataset=dataset,
        val_dataset=None,
        reward_funcs=[reward],
        args=GRPOTrainingArgs(
            batch_size=job["prompts_per_step"],
            group_size=job["group_size"],
            iters=job["steps"],
            steps_per_report=1,
            steps_per_save=10_000,
            beta=job["beta"],
            epsilon=0.2,
            max_completion_length=job["max_new_tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_seq_length=4096,
            adapter_file=str(Path.cwd() / "adapters.safetensors"),
        ),
        training_callback=watch,
        end_answer_token="",
    )
    steps = [
        {
            "seconds": step.seconds,
            "cpu_seconds": step.cpu_seconds,
            "sampled_tokens": sampled,
            "with_spread": spread,
        }
        for step, sampled, spread in zip(watch.log.steps, watch.sampled, reward.with_spread, strict=True)
    ]
    return {
        "versions": harness.versions("mlx-lm-lora", "mlx", "mlx-lm"),
        "settings": {"weights": "float32"},
        "steps": steps,
        "peak_resident_bytes": harness.peak_resident_bytes(),
    }


if __name__ == "__main__":
    harness.answer(train)
