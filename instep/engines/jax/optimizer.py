"""AdamW over a tree of float32 arrays, in place."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from instep.config import OptimizerSettings
from instep.engines.base import StepReport
from instep.engines.jax.compile_time import compiled
from instep.engines.jax.lora import Tree
from instep.engines.jax.mesh import fetch


def _zeros(tree: Tree) -> Tree:
    """Zeros of the tree's shapes, placed as the tree is: where an argument lies is part of a compiled step, and
    zeros that a jitted function makes lie on no device in particular, so that the second step would be compiled anew.
    """
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), tree)


@compiled()
def _norm(gradient: Tree) -> jax.Array:
    """Global norm; scaled by the largest value, so that no square overflows float32."""
    leaves = jax.tree.leaves(gradient)
    top = jnp.max(jnp.stack([jnp.abs(leaf).max() for leaf in leaves]))
    unit = jnp.where(top > 0, top, 1.0)
    return top * jnp.sqrt(sum(jnp.sum(jnp.square(leaf / unit)) for leaf in leaves))


@compiled(donate_argnums=(0, 1, 2, 3))
def _adamw(
    master: Tree, exp_avg: Tree, exp_avg_sq: Tree, gradient: Tree, scalars: dict[str, Any]
) -> tuple[Tree, Tree, Tree, Tree]:
    s = scalars

    def update(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        g = g * s["scale"]
        m = m + (g - m) * s["rest1"]
        v = v * s["beta2"] + g * g * s["rest2"]
        p = p * s["decay"]
        p = p - s["rate"] * m / (jnp.sqrt(v) / s["root_correction2"] + s["epsilon"])
        return p, m, v, jnp.zeros_like(g)

    leaves, structure = jax.tree.flatten(master)
    columns = zip(*(jax.tree.leaves(tree) for tree in (exp_avg, exp_avg_sq, gradient)), strict=True)
    updated = [update(p, *others) for p, others in zip(leaves, columns, strict=True)]
    return tuple(jax.tree.unflatten(structure, [one[i] for one in updated]) for i in range(4))  # type: ignore[return-value]


class AdamW:
    """The masters, their moments and the gradient gathered so far: 16 bytes a parameter."""

    def __init__(self, master: Tree) -> None:
        self.master = master
        self.exp_avg, self.exp_avg_sq, self.gradient = (_zeros(master) for _ in range(3))
        self.step = 0

    def zero_gradient(self) -> None:
        self.gradient = _zeros(self.gradient)

    def update(self, settings: OptimizerSettings, learning_rate: float, denominator: float) -> StepReport:
        """AdamW with bias correction and decoupled decay (Loshchilov & Hutter, arXiv 1711.05101).

        The gradient is divided by `denominator` and its global norm clipped; it is zero afterwards. Nothing else
        changes where the norm is not finite.
        """
        norm = float(fetch(_norm(self.gradient))) / denominator
        if not math.isfinite(norm):
            self.zero_gradient()
            return StepReport(gradient_norm=norm, applied=False)
        clip = min(1.0, settings.clip_norm / norm) if norm > 0 else 1.0
        self.step += 1
        correction1 = 1 - settings.beta1**self.step
        correction2 = 1 - settings.beta2**self.step
        scalars = {
            "scale": clip / denominator,
            "rest1": 1 - settings.beta1,
            "beta2": settings.beta2,
            "rest2": 1 - settings.beta2,
            "decay": 1 - learning_rate * settings.weight_decay,
            "rate": learning_rate / correction1,
            "root_correction2": correction2**0.5,
            "epsilon": settings.epsilon,
        }
        self.master, self.exp_avg, self.exp_avg_sq, self.gradient = _adamw(
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.gradient,
            {name: np.float32(value) for name, value in scalars.items()},
        )
        return StepReport(gradient_norm=norm, applied=True)
