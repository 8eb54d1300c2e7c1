"""The compiled functions of training and scoring."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from instep.engines.jax import decoder
from instep.engines.jax.attention import Grid, Places
from instep.engines.jax.compile_time import compiled
from instep.engines.jax.decoder import Setup
from instep.engines.jax.head import HeadSpec, site_logprob
from instep.engines.jax.lora import Tree
from instep.engines.jax.weights import Weights
from instep.objectives import Objective


def _site_logprob(
    setup: Setup, grid: Grid, temperature: float, weights: Weights, lora: Tree | None, arrays: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the labels at the layout's sites float32 [K], and whether each is the argmax."""
    prefix = jnp.arange(grid.prefix, dtype=jnp.int32)
    tokens = jnp.concatenate([arrays["prefix"], arrays["tokens"].reshape(-1)])
    position = jnp.concatenate([prefix, arrays["position"].reshape(-1)])
    places = Places(arrays["segment"], arrays["position"], arrays["prefix_length"])
    states, _ = decoder.hidden_states(setup, weights, lora, grid, tokens, position, places)
    at_sites = decoder.final_norm(setup.architecture, weights, states[arrays["site"]])
    chunk = min(setup.chunk, len(arrays["site"]))
    spec = HeadSpec(chunk, temperature, setup.architecture.logit_softcap)
    with setup.precision(states.dtype):
        return site_logprob(spec, at_sites, decoder.head(weights), arrays["label"], arrays["count"])


@compiled(static_argnums=(0, 1, 2), donate_argnums=(5,))
def accumulate(
    setup: Setup,
    grid: Grid,
    objective: Objective,
    weights: Weights,
    lora: Tree,
    gradient: Tree,
    arrays: dict[str, Any],
) -> tuple[Tree, dict[str, jax.Array]]:
    """The gradient with that of the batch added, and the batch's sums; a loss that is not finite adds nothing."""

    def loss_of(lora: Tree) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprob, correct = _site_logprob(setup, grid, objective.temperature, weights, lora, arrays)
        fields = arrays["fields"]
        loss, metrics = objective(jnp, logprob, fields)
        right = jnp.sum(correct & (fields["weight"] > 0))
        return loss, {"correct": right.astype(jnp.float32), **metrics}

    (loss, sums), added = jax.value_and_grad(loss_of, has_aux=True)(lora)
    usable = jnp.isfinite(loss)
    gradient = jax.tree.map(lambda total, own: total + jnp.where(usable, own, 0.0), gradient, added)
    return gradient, {"loss": loss, **sums}


@compiled(static_argnums=(0, 1, 2))
def score(
    setup: Setup, grid: Grid, temperature: float, weights: Weights, lora: Tree | None, arrays: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities at the layout's sites without gradient; `lora` None is the base model."""
    return _site_logprob(setup, grid, temperature, weights, lora, arrays)
