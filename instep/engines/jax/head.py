"""The LM head at sites only: log-probabilities of labels without a [K, V] tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class HeadSpec:
    """At most [chunk, V] logits are alive at once."""

    chunk: int
    temperature: float
    softcap: float | None


def capped(logits: jax.Array, softcap: float | None) -> jax.Array:
    return logits if softcap is None else jnp.tanh(logits / softcap) * softcap


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def site_logprob(
    spec: HeadSpec, hidden: jax.Array, weight: jax.Array, label: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """log softmax(softcap(h·Wᵀ) / T)[label] float32 [K], and whether the label is the argmax [K].

    hidden [K, D] (K a multiple of the chunk), weight [V, D] frozen, label int32 [K]. Only the chunks that hold
    the first `count` sites are computed, the others are 0: how many there are is no part of the compiled shape.
    """
    return _chunks(spec, hidden, weight, label, count, derivative=False)[:2]


def _chunks(
    spec: HeadSpec,
    hidden: jax.Array,
    weight: jax.Array,
    label: jax.Array,
    count: jax.Array,
    derivative: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Log-probabilities, correctness and, where asked for, the derivative with respect to h [K, D].

    It is (W[label] − Σ_v p_v·W[v]) / T, made in the same pass, so that the backward pass is one multiplication
    (the idea of Liger Kernel, arXiv 2410.10989).
    """
    sites = hidden.shape[0]
    start = (
        jnp.zeros(sites, jnp.float32),
        jnp.zeros(sites, bool),
        jnp.zeros_like(hidden) if derivative else None,
    )

    def body(index: jax.Array, carry: Any) -> Any:
        logprob, correct, slopes = carry
        at = index * spec.chunk
        h = jax.lax.dynamic_slice_in_dim(hidden, at, spec.chunk)
        target = jax.lax.dynamic_slice_in_dim(label, at, spec.chunk)
        raw = jnp.einsum("kd,vd->kv", h, weight, preferred_element_type=jnp.float32)
        logits = capped(raw, spec.softcap)
        right = logits.argmax(-1).astype(jnp.int32) == target
        scaled = logits / spec.temperature
        chosen = jnp.take_along_axis(scaled, target[:, None], 1)[:, 0]
        total = jax.nn.logsumexp(scaled, -1)
        put = jax.lax.dynamic_update_slice_in_dim
        logprob, correct = put(logprob, chosen - total, at, 0), put(correct, right, at, 0)
        if derivative:
            of_logits = -jnp.exp(scaled - total[:, None])
            vocabulary = jax.lax.broadcasted_iota(jnp.int32, of_logits.shape, 1)
            of_logits = jnp.where(vocabulary == target[:, None], 1.0 + of_logits, of_logits)
            if spec.softcap is not None:
                of_logits *= 1.0 - (logits / spec.softcap) ** 2
            slope = jnp.einsum(
                "kv,vd->kd", of_logits.astype(weight.dtype), weight, preferred_element_type=jnp.float32
            )
            slopes = put(slopes, (slope / spec.temperature).astype(hidden.dtype), at, 0)
        return logprob, correct, slopes

    chunks = (count + spec.chunk - 1) // spec.chunk
    return jax.lax.fori_loop(0, chunks, body, start)


def _keep(
    spec: HeadSpec, hidden: jax.Array, weight: jax.Array, label: jax.Array, count: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    logprob, correct, derivative = _chunks(spec, hidden, weight, label, count, derivative=True)
    return (logprob, correct), derivative


def _backward(spec: HeadSpec, derivative: jax.Array, grads: Any) -> tuple[Any, ...]:
    return grads[0][:, None].astype(derivative.dtype) * derivative, None, None, None


site_logprob.defvjp(_keep, _backward)
