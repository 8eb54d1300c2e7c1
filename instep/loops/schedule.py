"""When training ends, and the learning rate until then."""

from __future__ import annotations

import math
from dataclasses import dataclass

from instep.config import OptimizerSettings


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine down to `final_share` of the peak, or constant.

    Progress is the share of steps done or, where a time limit is set, the larger of that and the share of
    seconds used: the schedule ends when training ends, whichever limit comes first.
    """

    optimizer: OptimizerSettings
    total_steps: int
    limit_seconds: float | None = None

    def done(self, step: int, seconds: float) -> bool:
        out_of_time = self.limit_seconds is not None and seconds >= self.limit_seconds
        return step >= self.total_steps or out_of_time

    def progress(self, step: int, seconds: float) -> float:
        """Share of the run, in (0, 1], at the end of step `step` (0, 1, …)."""
        share = (step + 1) / self.total_steps
        if self.limit_seconds is not None:
            share = max(share, seconds / self.limit_seconds)
        return min(share, 1.0)

    def learning_rate(self, step: int, seconds: float) -> float:
        share, settings = self.progress(step, seconds), self.optimizer
        if share < settings.warmup_share:
            return settings.learning_rate * share / settings.warmup_share
        if settings.schedule == "constant":
            return settings.learning_rate
        along = (share - settings.warmup_share) / (1 - settings.warmup_share)
        cosine = (1 + math.cos(math.pi * along)) / 2
        return settings.learning_rate * (settings.final_share + (1 - settings.final_share) * cosine)

    def remaining_seconds(self, step: int, seconds: float, step_seconds: float) -> float:
        """Estimate from the pace so far; never more than the time limit leaves."""
        left = (self.total_steps - step) * step_seconds
        if self.limit_seconds is not None:
            left = min(left, max(0.0, self.limit_seconds - seconds))
        return left
