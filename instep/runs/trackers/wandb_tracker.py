"""Weights & Biases. `wandb login` or WANDB_API_KEY is needed once; WANDB_MODE=offline keeps the run local."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.runs.trackers import Target


def load(home: Path, space_id: str | None) -> Any:
    import wandb

    return wandb


class WandbRun:
    def __init__(self, target: Target) -> None:
        wandb = load(target.home, target.space_id)
        self._run = wandb.init(
            project=target.project,
            id=re.sub(r"[/\\#?%:]", "-", target.run_id),
            name=target.run_id,
            dir=str(target.run_folder),
            config=target.config,
            resume="allow",
            # Only the figures and the settings: no console, command line, host, repository or code.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
            ),
        )
        # Its history only grows: what it has already is not sent again.
        self._skip_below = int(self._run.step or 0)

    def log(self, step: int, values: dict[str, float]) -> None:
        if step >= self._skip_below:
            self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def open_tracker(target: Target, problem: Callable[[str], None]) -> WandbRun:
    return WandbRun(target)
