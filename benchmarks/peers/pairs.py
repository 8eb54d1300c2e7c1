"""What the drivers of paired measurements share: jobs, medians over steps, and the part that shows both sides."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import recipes
from harness import Part, Row

import instep
from instep.config import LINEAR_LAYERS

OWN = {"PYTHONPATH": str(Path(instep.__file__).resolve().parents[1])}
"""So that a worker measures the instep that the driver was started with."""
LOSS_AGREES = 1e-3
Runs = dict[str, list[dict[str, Any]]]


def worker(side: str, python: Path | str, script: str, job: dict[str, Any]) -> dict[str, Any]:
    """One measurement in a fresh process; how long it took is shown."""
    began = time.perf_counter()
    environment = OWN if script.startswith("instep_") else {}
    result = harness.run_worker(python, harness.PEERS / script, job, environment)
    print(f"  {side}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return result


def sft_job(model: Path, rows: Path, steps: int, engine: str, checkpointing: bool = False) -> dict[str, Any]:
    return {
        "task": "train",
        "engine": engine,
        "precision": "float32",
        "model": str(model),
        "rows": str(rows),
        "max_length": 8192,
        "rows_per_step": 1,
        "learning_rate": 2e-4,
        "rank": 16,
        "alpha": 32,
        "target_modules": list(LINEAR_LAYERS),
        "gradient_checkpointing": checkpointing,
        "steps": steps,
        "seconds": None,
        "pack": False,
        "adapter": None,
        "seed": 0,
    }


def write_row(path: Path, model: Path, data: Path, length: int) -> Path:
    """A row of exactly so many tokens of the session, of which the last quarter is supervised."""
    whole = recipes.row_of_length(model, data, length)
    return harness.write_rows(path, [Row(whole.tokens, [at >= length - length // 4 for at in range(length)])])


def median(runs: list[dict[str, Any]], of: str) -> float:
    """Over the steps after each run's first, which compiles."""
    return statistics.median(step[of] for found in runs for step in found["steps"][1:])


def speed(runs: list[dict[str, Any]], of: str = "tokens") -> float:
    """Median over the steps after the first of tokens a second."""
    return statistics.median(step[of] / step["seconds"] for found in runs for step in found["steps"][1:])


def peak(runs: list[dict[str, Any]]) -> float:
    return max(found["peak_resident_bytes"] for found in runs)


def check_first_losses(runs: Runs, peer: str) -> dict[str, float]:
    """The first loss of each side. Raises RuntimeError where they do not agree."""
    losses = {side: found[0]["steps"][0]["loss"] for side, found in runs.items()}
    if abs(losses["instep"] - losses[peer]) > LOSS_AGREES * losses[peer]:
        raise RuntimeError(f"the first losses are {losses}: the sides do not take the same step")
    return losses


@dataclass(frozen=True)
class Targets:
    """At least so many times the peer's rate; at most this share of its peak."""

    rate: float
    peak_share: float


def grpo_part(title: str, peer: str, runs: Runs, targets: Targets, remarks: Mapping[str, str]) -> Part:
    """Seconds, tokens and memory of both sides' whole steps, and the two ratios."""
    part = Part(
        title,
        ["side", "seconds/step", "cpu-s/step", "sampled tokens/step", "peak GB"],
        [
            [
                side,
                f"{median(found, 'seconds'):.2f}",
                f"{median(found, 'cpu_seconds'):.1f}",
                f"{median(found, 'sampled_tokens'):.0f}",
                f"{peak(found) / 1e9:.2f}",
            ]
            for side, found in runs.items()
        ],
    )
    rate = median(runs[peer], "seconds") / median(runs["instep"], "seconds")
    share = peak(runs["instep"]) / peak(runs[peer])
    steps = len(runs["instep"][0]["steps"])
    part.remarks = [
        harness.verdict(f"step rate against {peer}", rate, targets.rate, at_most=False),
        harness.verdict(f"peak memory against {peer}", share, targets.peak_share, at_most=True),
        f"instep's step: {median(runs['instep'], 'seconds_rollouts'):.2f} s of rollouts and rewards, "
        f"{median(runs['instep'], 'seconds_forward_backward'):.2f} s of reference, forward and backward",
        f"{len(runs['instep'])} run(s) a side, {steps} steps each, the first left out; medians, highest peak",
        *(f"{name}: {value}" for name, value in remarks.items()),
    ]
    part.data = {"runs": runs}
    return part
