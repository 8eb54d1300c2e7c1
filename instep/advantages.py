"""Group-relative credit: from the rewards of one group [G] to the advantage of each of its rollouts [G]."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

EPSILON = 1e-4
"""Added to the group's standard deviation (arXiv 2402.03300, as design §4 has it)."""
SPREAD = 1e-6
"""Rewards that differ by no more than this, relative to their size, are the same."""


def combine(rewards: Mapping[str, np.ndarray], weight: Callable[[str], float]) -> np.ndarray:
    """Weighted sum of a group's rewards, float64 [G]; NaN where no reward applies to a rollout.

    rewards: name → [G], NaN where that reward does not apply. There it is taken as the mean of the group's
    other rollouts, so that it neither favours nor harms the rollout among them; 0 where it applies to none.
    """
    names = [name for name in rewards if weight(name) != 0]
    if not names:
        raise ValueError("no reward with a weight other than 0")
    values = np.stack([np.asarray(rewards[name], dtype=np.float64) for name in names])
    applies = ~np.isnan(values)
    if np.isinf(values).any():
        raise ValueError("a reward is infinite")
    counts = np.maximum(applies.sum(axis=1, keepdims=True), 1)
    means = np.where(applies, values, 0.0).sum(axis=1, keepdims=True) / counts
    total = np.array([weight(name) for name in names]) @ np.where(applies, values, means)
    return np.where(applies.any(axis=0), total, np.nan)


def has_spread(total: np.ndarray) -> bool:
    """Whether a group's rewards differ at all: without that nothing can be learned from it."""
    known = total[~np.isnan(total)]
    return len(known) > 1 and float(np.ptp(known)) > SPREAD * max(1.0, float(np.abs(known).max()))


def group_relative(total: np.ndarray, scale_by_std: bool = True) -> np.ndarray:
    """A = (r − mean) / (std + 1e-4), float32 [G]; without the division where not `scale_by_std` (dr_grpo,
    arXiv 2503.20783).

    std is the sample standard deviation (n − 1). NaN in `total` is a rollout that no reward applies to: it gets
    0 and does not enter mean and std. All are 0 where the group has no spread.
    """
    known = ~np.isnan(total)
    advantage = np.zeros(len(total), dtype=np.float64)
    if has_spread(total):
        values = total[known].astype(np.float64)
        advantage[known] = values - values.mean()
        if scale_by_std:
            advantage[known] /= values.std(ddof=1) + EPSILON
    return advantage.astype(np.float32)


def leave_one_out(total: np.ndarray) -> np.ndarray:
    """A = r − mean of the other rollouts (RLOO, arXiv 2402.14740), float32 [G]; NaN and no spread as above."""
    known = ~np.isnan(total)
    count = int(known.sum())
    advantage = group_relative(total, scale_by_std=False).astype(np.float64)
    return (advantage * (count / max(count - 1, 1))).astype(np.float32)
