"""TRL's side of the GRPO benchmark: GRPOTrainer on the same prompts. Runs under the peer's Python.

Usage: python trl_grpo.py JOB.json RESULT.json (see `harness.run_worker`).

What TRL is given besides `trl_settings`: prompts of one length so that nothing is padded, and one group a micro-batch,
as instep has it. The reference is the model with its adapter off, as in instep.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import trl_settings
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from vowels import share_of_vowels


class Rewards:
    """The reward, which also notes how many tokens were sampled and how many groups have spread."""

    __name__ = "vowels"

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.sampled_tokens = 0
        self.with_spread = 0.0

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        values = [share_of_vowels(messages[0]["content"]) for messages in completions]
        groups = [values[at : at + self.group_size] for at in range(0, len(values), self.group_size)]
        self.sampled_tokens = sum(len(ids) for ids in completion_ids)
        self.with_spread = sum(max(group) > min(group) for group in groups) / len(groups)
        return values


class Watch(TrainerCallback):
    def __init__(self, rewards: Rewards) -> None:
        self.log, self.rewards = harness.StepLog(), rewards
        self.steps: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.log.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.log.end_step(float("nan"), self.rewards.sampled_tokens, 0)
        last = self.log.steps[-1]
        self.steps.append(
            {
                "seconds": last.seconds,
                "cpu_seconds": last.cpu_seconds,
                "sampled_tokens": self.rewards.sampled_tokens,
                "with_spread": self.rewards.with_spread,
            }
        )


def config(job: dict[str, Any]) -> GRPOConfig:
    return GRPOConfig(
        **trl_settings.training_arguments(job),
        per_device_train_batch_size=job["group_size"],
        gradient_accumulation_steps=job["prompts_per_step"],
        num_generations=job["group_size"],
        max_completion_length=job["max_new_tokens"],
        temperature=1.0,
        beta=job["beta"],
        loss_type="grpo",
        gradient_checkpointing=False,
        max_steps=job["steps"],
        shuffle_dataset=False,
    )


def train(job: dict[str, Any]) -> dict[str, Any]:
    lines = Path(job["prompts"]).read_text(encoding="utf-8").split("\n")
    prompts = [json.loads(line)["messages"] for line in lines if line]
    rewards = Rewards(job["group_size"])
    watch = Watch(rewards)
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=rewards,
        args=config(job),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        peft_config=trl_settings.lora(job),
        callbacks=[watch],
    )
    trainer.train()
    return {
        "versions": harness.versions(*harness.TRL_PACKAGES),
        "settings": trl_settings.settings_of(trainer.model),
        "steps": watch.steps,
        "peak_resident_bytes": harness.peak_resident_bytes(),
    }


if __name__ == "__main__":
    harness.answer(train)
