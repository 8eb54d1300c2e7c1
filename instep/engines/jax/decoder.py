"""The decoder of every family as a function of its weights: one layer, scanned over the stacked layers.

Weights and adapters are arguments of whatever is compiled, never constants inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from instep.engines.jax import nf4
from instep.engines.jax.architecture import Architecture
from instep.engines.jax.attention import Grid, Kernel, Places, attend
from instep.engines.jax.lora import Tree
from instep.engines.jax.weights import MATRICES, Weights

KEPT = ("qkv", "attention", "attention_sum", "o", "gate_up", "down", "low_rank")
"""What a layer keeps for its backward pass: what products gave. Norms, ropes and activations are made again, which
is quicker than to write them to memory and read them back."""

Mode = Literal["forward", "train", "recompute"]


@dataclass(frozen=True)
class Setup:
    """All that is static about a loaded model; `scale` is alpha / rank, `chunk` sites of the head at once."""

    architecture: Architecture
    scale: float
    kernel: Kernel
    mode: Mode
    chunk: int

    def precision(self, dtype: Any) -> AbstractContextManager[Any]:
        """float32 means float32 on GPUs and TPUs too, which would round the factors of products by themselves."""
        return jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float, offset: float) -> jax.Array:
    """RMS norm over the last axis, in float32 (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return (normed * (weight.astype(jnp.float32) + offset)).astype(x.dtype)


def rope_tables(architecture: Architecture, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every kind of layer: position int32 [N] → float32 [kinds, N, d / 2] twice."""
    frequencies = np.stack(
        [kind.rope.inverse_frequencies(architecture.head_dim) for kind in architecture.kinds]
    )
    angle = position.astype(jnp.float32)[None, :, None] * jnp.asarray(frequencies)[:, None]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [N, heads, d] turned by its positions; cos, sin [N, d / 2]."""
    low, high = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)


def _product(
    setup: Setup, x: jax.Array, layer: Weights, lora: Tree | None, name: str, keep: bool = True
) -> list[jax.Array]:
    """x [N, in] through the matrices that lie in `name`, adapters added: one [N, out] for each."""
    modules = [path.rpartition(".")[2] for path in MATRICES[name]]
    widths = [setup.architecture.widths[module] for module in modules]
    shape = (sum(out for _, out in widths), widths[0][0])
    weight = layer[name]
    if isinstance(weight, nf4.Nf4):
        weight = nf4.dequantize(weight, shape, x.dtype)
    y = x @ weight.T
    bias = layer.get(f"{name}_bias")
    if bias is not None:
        y = y + bias
    parts = jnp.split(y, np.cumsum([out for _, out in widths])[:-1].tolist(), -1)
    adapted = [i for i, module in enumerate(modules) if lora is not None and module in lora]
    if lora is not None and adapted:
        a = jnp.concatenate([lora[modules[i]]["a"] for i in adapted]).astype(x.dtype)
        low = checkpoint_name(x @ a.T, "low_rank") if keep else x @ a.T
        for i, image in zip(adapted, jnp.split(low, len(adapted), -1), strict=True):
            b = lora[modules[i]]["b"].astype(x.dtype)
            parts[i] = parts[i] + (image @ b.T) * jnp.asarray(setup.scale, x.dtype)
    return [checkpoint_name(part, name) for part in parts] if keep else parts


Attention = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""(q [N, H, d], k, v [N, H_kv, d], kind) → (output [N, H, d], what else it wants to hand on)."""


def layer_forward(
    setup: Setup,
    x: jax.Array,
    layer: Weights,
    lora: Tree | None,
    kind: jax.Array,
    tables: tuple[jax.Array, jax.Array],
    attention: Attention,
) -> tuple[jax.Array, Any]:
    """One decoder layer: x [N, D] → [N, D], and what its attention handed on."""
    shape = setup.architecture
    tokens, width = x.shape[0], shape.head_dim

    def norm(value: jax.Array, name: str) -> jax.Array:
        return rms_norm(value, layer[name], shape.epsilon, shape.norm_offset)

    projected = _product(setup, norm(x, "input_norm"), layer, lora, "qkv")
    q, k, v = (part.reshape(tokens, -1, width) for part in projected)
    if shape.qk_norm:
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    cos, sin = tables[0][kind], tables[1][kind]
    mixed, handed_on = attention(rotate(q, cos, sin), rotate(k, cos, sin), v, kind)
    (out,) = _product(setup, mixed.reshape(tokens, -1), layer, lora, "o")
    x = x + (norm(out, "attention_norm") if shape.sandwich_norms else out)
    gate, up = _product(setup, norm(x, "mlp_norm"), layer, lora, "gate_up")
    gate = jax.nn.silu(gate) if shape.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    (out,) = _product(setup, gate * up, layer, lora, "down")
    return x + (norm(out, "output_norm") if shape.sandwich_norms else out), handed_on


def embed(architecture: Architecture, weights: Weights, tokens: jax.Array) -> jax.Array:
    """int32 [N] → [N, D]. The scale is rounded to the type of the weights, as the family's reference does."""
    x = weights["embed"][tokens]
    if architecture.embedding_scale != 1.0:
        x = x * jnp.asarray(architecture.embedding_scale, x.dtype)
    return x


def final_norm(architecture: Architecture, weights: Weights, x: jax.Array) -> jax.Array:
    return rms_norm(x, weights["norm"], architecture.epsilon, architecture.norm_offset)


def head(weights: Weights) -> jax.Array:
    """The head's matrix [V, D]: its own, or the embedding."""
    return weights["head"] if "head" in weights else weights["embed"]


def kinds_of_layers(architecture: Architecture) -> jax.Array:
    return jnp.asarray(architecture.kind_of_layer, jnp.int32)


def hidden_states(
    setup: Setup,
    weights: Weights,
    lora: Tree | None,
    grid: Grid,
    tokens: jax.Array,
    position: jax.Array,
    places: Places,
    keep_keys: bool = False,
) -> tuple[jax.Array, Any]:
    """States before the final norm [N, D] of the prefix and then the rows; tokens, position int32 [N].

    With `keep_keys` also every layer's rotated keys and values [layers, N, H_kv, d].
    """
    x = embed(setup.architecture, weights, tokens)
    tables = rope_tables(setup.architecture, position)

    def body(x: jax.Array, layer: Sequence[Any]) -> tuple[jax.Array, Any]:
        def attention(q: jax.Array, k: jax.Array, v: jax.Array, kind: jax.Array) -> tuple[jax.Array, Any]:
            mixed = attend(setup.architecture, setup.kernel, grid, q, k, v, places, kind)
            return mixed, (k, v) if keep_keys else None

        return layer_forward(setup, x, layer[0], layer[1], layer[2], tables, attention)

    if setup.mode == "recompute":
        body = jax.checkpoint(body, prevent_cse=False)
    elif setup.mode == "train":
        policy = jax.checkpoint_policies.save_only_these_names(*KEPT)
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
    with setup.precision(x.dtype):
        return jax.lax.scan(body, x, (weights["layers"], lora, kinds_of_layers(setup.architecture)))
