"""AdamW over lists of float32 arrays, as compiled functions. The same step as the other engines take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from instep.config import OptimizerSettings

Arrays = Sequence[mx.array]


def number(scalar: mx.array) -> float:
    """A real scalar array as a Python number."""
    return float(scalar.item())  # type: ignore[arg-type]


def global_norm(gradient: Arrays) -> mx.array:
    """Euclidean norm over all arrays, float32 scalar."""
    return mx.sqrt(sum((mx.sum(mx.square(g)) for g in gradient), mx.array(0.0)))


def adamw(settings: OptimizerSettings) -> Callable[..., Any]:
    """A compiled update: (parameters, gradient, exp_avg, exp_avg_sq, learning_rate, scale, correction1,
    correction2) → new (parameters, exp_avg, exp_avg_sq).

    Decoupled decay and bias correction (Loshchilov & Hutter, arXiv 1711.05101); `mlx.optimizers.AdamW` leaves the
    correction out by default. Scalars are arrays: a Python float would trace anew for each value.
    """
    beta1, beta2, epsilon = settings.beta1, settings.beta2, settings.epsilon
    decay = settings.weight_decay

    def update(
        parameters: Arrays,
        gradient: Arrays,
        exp_avg: Arrays,
        exp_avg_sq: Arrays,
        learning_rate: mx.array,
        scale: mx.array,
        correction1: mx.array,
        correction2: mx.array,
    ) -> tuple[list[mx.array], list[mx.array], list[mx.array]]:
        new: tuple[list[mx.array], list[mx.array], list[mx.array]] = ([], [], [])
        for p, g, m, v in zip(parameters, gradient, exp_avg, exp_avg_sq, strict=True):
            g = g * scale
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * mx.square(g)
            if decay:
                p = p * (1 - learning_rate * decay)
            p = p - (learning_rate / correction1) * m / (mx.sqrt(v) / mx.sqrt(correction2) + epsilon)
            for values, value in zip(new, (p, m, v), strict=True):
                values.append(value)
        return new

    return mx.compile(update)
