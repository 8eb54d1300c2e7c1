"""Every loss, written once over an array namespace `xp` (numpy, torch, jax.numpy or mlx.core).

An objective maps log-probabilities at sites [K] to a *sum* over sites; the engine divides by the global
denominator of the optimizer step. `fields` holds the batch's [K] arrays in the same namespace. Weights are
part of the sum, so padding sites (weight 0) have no influence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from instep.records import Batch

GrpoVariant = Literal["grpo", "bnpo", "dapo", "dr_grpo", "gspo"]


class Objective(Protocol):
    """Callable loss. Implementations are frozen and hashable, because engines compile one step per objective."""

    @property
    def temperature(self) -> float:
        """Temperature at which every log-probability is taken."""
        ...

    def __call__(self, xp: Any, logprob: Any, fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return (loss sum, metric sums), scalars of the namespace `xp`."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """−Σ w·log p; divided by Σ w over the whole optimizer step it is the token-mean negative log-likelihood."""

    temperature: float = 1.0

    def __call__(self, xp: Any, logprob: Any, fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return -xp.sum(fields["weight"] * logprob), {}


@dataclass(frozen=True)
class Grpo:
    """Group-relative policy optimisation (arXiv 2402.03300) and its relatives, as one clipped sum.

    With log r = log p − log p_behaviour, taken per token, or for `gspo` (arXiv 2507.18071, eq. 7) as its mean
    over the sequence that the token belongs to:

        Σ_k w_k · ( −min(r_k·A_k, clip(r_k, 1−ε_low, 1+ε_high)·A_k) + β·(exp(d_k) − d_k − 1) )

    where d = log p_reference − log p (the k3 estimator of KL(p ‖ p_reference), never negative). What makes the
    variants differ otherwise is w and the denominator: see `loss_weights`.

    fields: weight, behaviour_logprob, advantage [K]; reference_logprob [K] where beta > 0; sequence [K] for
    gspo, for which every sequence must lie within one batch and `sequences` must be at least the number of
    sequences in any batch (it is fixed, so that engines compile once; `check` tells). entropy [K] is summed
    where an engine gives it.

    Metric sums over sites of weight > 0: `kl` (beta > 0), `ratio`, `clip_low` and `clip_high` (sites where the
    clip takes the gradient away), `log_ratio` (Σ |log r|), `entropy`; and `max_log_ratio` (max |log r| per token),
    which is no sum: `add_metrics` adds batches up rightly.
    """

    variant: GrpoVariant = "grpo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    beta: float = 0.0
    temperature: float = 1.0
    sequences: int = 0

    def __post_init__(self) -> None:
        if self.variant not in get_args(GrpoVariant):
            raise ValueError(f"variant {self.variant!r}: known are {', '.join(get_args(GrpoVariant))}")
        if not (
            0 < self.epsilon_low < 1 and self.epsilon_high > 0 and self.beta >= 0 and self.temperature > 0
        ):
            raise ValueError(f"epsilons, beta or temperature out of range: {self}")
        if self.variant == "gspo" and self.sequences < 1:
            raise ValueError("gspo needs `sequences`: the largest number of sequences in a batch")

    def check(self, batch: Batch) -> None:
        """Raise ValueError where the batch lacks what the objective reads."""
        needed = ["behaviour_logprob", "advantage"]
        needed += ["reference_logprob"] * (self.beta > 0) + ["sequence"] * (self.variant == "gspo")
        missing = [name for name in needed if getattr(batch, name) is None]
        if missing:
            raise ValueError(f"the objective {self.variant} needs {', '.join(missing)} in the batch")
        if (
            self.variant == "gspo"
            and batch.sequence is not None
            and batch.sequence.max(initial=0) >= self.sequences
        ):
            raise ValueError(f"a batch of more than {self.sequences} sequences, for which gspo was set up")

    def __call__(self, xp: Any, logprob: Any, fields: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        weight, advantage = fields["weight"], fields["advantage"]
        real = weight > 0
        zero, one = xp.zeros_like(logprob), xp.ones_like(logprob)
        # Padding sites predict a token of no meaning, whose exp could be infinite: 0 · inf is not 0.
        token_log_ratio = xp.where(real, logprob - fields["behaviour_logprob"], zero)
        log_ratio = token_log_ratio
        if self.variant == "gspo":
            log_ratio = self._sequence_mean(
                xp, token_log_ratio, xp.where(real, one, zero), fields["sequence"]
            )
        ratio = xp.exp(log_ratio)
        clipped = xp.clip(ratio, 1.0 - self.epsilon_low, 1.0 + self.epsilon_high)
        loss = -xp.minimum(ratio * advantage, clipped * advantage)

        def count(condition: Any) -> Any:
            return xp.sum(xp.where(condition & real, one, zero))

        metrics = {
            "ratio": xp.sum(xp.where(real, ratio, zero)),
            "clip_low": count((ratio < 1.0 - self.epsilon_low) & (advantage < 0)),
            "clip_high": count((ratio > 1.0 + self.epsilon_high) & (advantage > 0)),
            "log_ratio": xp.sum(xp.abs(token_log_ratio)),
            "max_log_ratio": xp.max(xp.abs(token_log_ratio)),
        }
        if self.beta > 0:
            distance = xp.where(real, fields["reference_logprob"] - logprob, zero)
            divergence = xp.exp(distance) - distance - 1.0
            loss = loss + self.beta * divergence
            metrics["kl"] = xp.sum(divergence)
        if fields.get("entropy") is not None:
            metrics["entropy"] = xp.sum(xp.where(real, fields["entropy"], zero))
        return xp.sum(weight * loss), metrics

    def _sequence_mean(self, xp: Any, values: Any, real: Any, sequence: Any) -> Any:
        """Mean of `values` over the real sites of each site's sequence, at that site [K].

        Unrolled over the sequences: the namespaces share no gather or segment sum of the same name, and a one-hot
        matrix would need an index array on the engine's device.
        """
        result = xp.zeros_like(values)
        for index in range(self.sequences):
            member = xp.where(sequence == index, real, xp.zeros_like(real))
            sites = xp.sum(member)
            result = result + member * (
                xp.sum(member * values) / xp.where(sites > 0, sites, xp.ones_like(sites))
            )
        return result


def loss_weights(
    variant: GrpoVariant, lengths: Sequence[int], max_tokens: int, rank: Sequence[int] | None = None
) -> tuple[np.ndarray, float]:
    """(weight of every token of each sequence float64 [S], denominator), for the whole optimizer step.

    `lengths` has the trained tokens of *every* sequence of the step, on all ranks: those of groups that are not
    propagated back because they have no spread count as they are (their policy loss is zero, but the mean is over
    them too); 0 is a sequence masked out of the loss, which counts nowhere (but in dr_grpo's constant). Give each
    token of sequence s the weight [s], add all batches up, and hand the denominator to `optim_step`: the result
    then does not depend on how the step was cut into batches.

        grpo, gspo   w = 1 / length     denominator = sequences              mean over tokens, then sequences
        dapo         w = 1              denominator = tokens                 mean over all tokens (2503.14476)
        bnpo         w = 1 / tokens of the sequence's rank
                                        denominator = ranks                  mean over a rank's tokens, then ranks
        dr_grpo      w = 1              denominator = S · max_tokens         constant length (2503.20783)

    bnpo normalises by the local batch. A micro-batch is no local batch here, since the loss would depend on how
    memory was spared: it is what one rank holds, `rank` [S] (default: one rank). On one rank bnpo is dapo.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    if not len(tokens) or tokens.min() < 0 or tokens.max() > max_tokens:
        raise ValueError(f"lengths must be some, and between 0 and {max_tokens}: {list(lengths)}")
    trained = tokens > 0
    if not trained.any():
        return np.zeros_like(tokens), 1.0
    if variant in ("grpo", "gspo"):
        return np.divide(1.0, tokens, out=np.zeros_like(tokens), where=trained), float(trained.sum())
    if variant == "dapo":
        return trained.astype(np.float64), float(tokens.sum())
    if variant == "dr_grpo":
        return trained.astype(np.float64), float(len(tokens) * max_tokens)
    if variant == "bnpo":
        ranks = np.zeros(len(tokens), dtype=np.int64) if rank is None else np.asarray(rank, dtype=np.int64)
        totals = np.bincount(ranks, weights=tokens)
        per_rank = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
        return np.where(trained, per_rank[ranks], 0.0), float((totals > 0).sum())
    raise ValueError(f"variant {variant!r}: known are {', '.join(get_args(GrpoVariant))}")


def add_metrics(total: Mapping[str, float], batch: Mapping[str, float]) -> dict[str, float]:
    """Metrics of two batches together: names that begin with `max_` by their maximum, others by their sum."""
    merged = dict(total)
    for name, value in batch.items():
        before = merged.get(name)
        if before is None:
            merged[name] = value
        else:
            merged[name] = max(before, value) if name.startswith("max_") else before + value
    return merged
