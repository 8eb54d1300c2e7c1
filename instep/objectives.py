"""Every loss, written once over an array namespace `xp` (numpy, torch, jax.numpy or mlx.core).

An objective maps log-probabilities at sites [K] to a *sum* over sites; the engine divides by the global
denominator of the optimizer step. `fields` holds the batch's [K] arrays in the same namespace. Weights are
part of the sum, so padding sites (weight 0) have no influence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

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
