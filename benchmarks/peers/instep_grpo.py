"""instep's side of the GRPO benchmark: whole `instep grpo` runs. Runs under the Python that instep is installed in.

Usage: python instep_grpo.py JOB.json RESULT.json (see `harness.run_worker`; the job's keys are those of `settings`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import harness

from instep.config import GrpoSettings
from instep.loops.grpo_run import run_grpo


def settings(job: dict[str, Any]) -> GrpoSettings:
    return GrpoSettings.model_validate(
        {
            "seed": job["seed"],
            "engine": job.get("engine", "torch"),
            "model": {
                "path": job["model"],
                "precision": job.get("precision", "bfloat16"),
                "device": "cpu",
                "gradient_checkpointing": job.get("gradient_checkpointing", False),
            },
            "adapter": {"rank": job["rank"], "alpha": job["alpha"], "target_modules": job["target_modules"]},
            "optimizer": {
                "learning_rate": job["learning_rate"],
                "schedule": "constant",
                "warmup_share": 0.0,
                "weight_decay": 0.0,
                "clip_norm": 1.0,
            },
            "task": {"name": job["prompts"], "test_path": job["held_out"], "system_prompt": ""},
            "rewards": [f"{harness.PEERS / 'vowels.py'}:vowels"],
            "rollouts": {"group_size": job["group_size"], "max_new_tokens": job["max_new_tokens"]},
            "objective": {"variant": "grpo", "beta": job["beta"]},
            "run": {"folder": str(Path.cwd() / "run"), "checkpoint_every_steps": 1000},
            "tasks_per_step": job["prompts_per_step"],
            "evaluation_tasks": 0,
            "max_steps": job["steps"],
            "watchdog_steps": 1000,
        }
    )


class Watch:
    """Keeps what the run says. The engine lets the kernel's high-water mark start again when it has loaded, so
    that the peak until then is sampled, and the sampling ends with the first note about the model."""

    def __init__(self, load_peak: harness.SampledPeak) -> None:
        self.load_peak = load_peak
        self.choices: dict[str, str] = {}
        self.steps: list[dict[str, float]] = []
        self._cpu = 0.0

    def note(self, text: str) -> None:
        if text.startswith("model:"):
            self.load_peak.end()
            self._cpu = sum(os.times()[:2])
        elif ": " in text:
            name, _, value = text.partition(": ")
            self.choices[name] = value

    def metrics(self, record: dict[str, Any], remaining_seconds: float | None) -> None:
        cpu = sum(os.times()[:2])
        if record.get("kind") == "train":
            seconds = {
                key: record[key] for key in ("seconds", "seconds_rollouts", "seconds_forward_backward")
            }
            spread = record["groups_with_spread_share"]
            tokens = record["sampled_tokens"]
            step = {"cpu_seconds": cpu - self._cpu, "sampled_tokens": tokens, "with_spread": spread}
            self.steps.append(seconds | step)
        self._cpu = cpu

    def phase(self, name: str, done: int, total: int) -> None:
        pass


def train(job: dict[str, Any]) -> dict[str, Any]:
    load_peak = harness.SampledPeak()
    load_peak.start()
    watch = Watch(load_peak)
    summary = run_grpo(settings(job), watch)
    peak = max(load_peak.bytes, harness.peak_resident_bytes())
    adapter = json.loads((Path.cwd() / "run" / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    return {
        "versions": harness.versions(*harness.INSTEP_PACKAGES),
        "settings": watch.choices | {"weights": summary["precision"], "rank": adapter["r"]},
        "steps": watch.steps,
        "peak_resident_bytes": peak,
    }


if __name__ == "__main__":
    harness.answer(train)
