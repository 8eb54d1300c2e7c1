"""The names of figures in `metrics.jsonl`: one vocabulary for every engine, every kind of run and every tracker.

A record has a `kind` (`train`: one a step; `validation`: one a held-out evaluation), a `step`, and figures by the
names below. A tracker shows them as `<kind>/<name>`, such as `train/loss` and `validation/token_accuracy`.
Units stand in the names. A figure that is null was not finite, or the platform cannot tell it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

METRICS = {
    # What is learned.
    "loss": "SFT: −Σ w·log p / Σ w over the whole step. GRPO: the objective over the step's denominator.",
    "token_accuracy": "Share of supervised tokens that are the model's most likely token.",
    "learning_rate": "The schedule's rate in this step.",
    "gradient_norm": "Global norm of the gradient before clipping.",
    "applied": "1 where the update was applied, 0 where a loss or gradient was not finite and it was skipped.",
    # GRPO.
    "reward": "Mean over rollouts of the weighted sum of rewards.",
    "reward_std": "Its standard deviation over the step's rollouts.",
    "reward/<name>": "Mean of one reward function over the rollouts it applies to.",
    "completion_tokens_mean": "Tokens of a completion, mean.",
    "truncated_share": "Share of completions that were cut at rollouts.max_new_tokens.",
    "groups_with_spread_share": "Share of groups whose rewards differ: only these are learned from.",
    "ratio": "Probability of a token now over that when it was sampled, mean over trained tokens.",
    "clip_low_share": "Share of trained tokens whose ratio was clipped below.",
    "clip_high_share": "Share of trained tokens whose ratio was clipped above.",
    "log_ratio_mean": "Mean of the logarithm of that ratio.",
    "log_ratio_max": "Largest absolute value of it before the first update: how far sampler and trainer differ.",
    "kl": "KL divergence from the reference (k3 estimator), mean over trained tokens.",
    "entropy": "Entropy of the next-token distribution, mean over trained tokens.",
    "rollouts": "Completions sampled in this step.",
    "sampled_tokens": "Tokens of the completions that were kept.",
    "comparison_timeouts": "Symbolic comparisons of answers that were given up.",
    # How much.
    "supervised_tokens": "Tokens that the loss was taken on.",
    "rows": "Held-out rows that were evaluated.",
    "tasks": "Held-out tasks that were answered.",
    "padding_share": "Share of the rows' places that hold padding.",
    # How fast.
    "supervised_tokens_per_second": "Supervised tokens over the wall time of the step.",
    "real_tokens_per_second": "Tokens without padding over the wall time of the step.",
    "padded_tokens_per_second": "Places of the rows, padding included, over the wall time of the step.",
    "seconds": "Wall time of the step or of the evaluation.",
    "seconds_data": "Part of it for making batches.",
    "seconds_rollouts": "Part of it for sampling and scoring completions.",
    "seconds_forward_backward": "Part of it for the loss and its gradient.",
    "seconds_optimizer": "Part of it for the update.",
    "seconds_compile": "JAX: time in the compiler since the step before, held-out evaluations included.",
    # Memory.
    "memory_live_bytes": "What the engine holds on its device (on a CPU: the process).",
    "memory_peak_bytes": "The most it held since it was loaded, where the platform can tell.",
    "memory_driver_bytes": "What the device's driver holds, caches included.",
    "memory_resident_bytes": "Resident set of the process.",
    "memory_available_bytes": "What the machine could give without swapping.",
    "memory_swap_used_bytes": "Swap in use on the machine, by all processes.",
}
NOT_FIGURES = ("kind", "step", "split")


def known(name: str) -> bool:
    """Whether a figure's name is in the vocabulary."""
    return name in METRICS or name.startswith("reward/")


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record under their tracker names; booleans as 0 and 1."""
    kind = record.get("kind", "train")
    return {
        f"{kind}/{name}": float(value)
        for name, value in record.items()
        if name not in NOT_FIGURES and isinstance(value, (int, float)) and math.isfinite(value)
    }
