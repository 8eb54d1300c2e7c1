"""Causal attention in blocks of queries, for CPUs: half of the scores, one exponential each.

On a CPU `mx.fast.scaled_dot_product_attention` computes the whole square of scores, and again in the backward
pass; exponentials and other elementwise passes over it take longer there than the products. On Metal and CUDA
mlx-lm's own call is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx

BLOCK = 256
"""Queries of one block."""
HIDDEN = -1e30
"""Score of what must not be seen; finite, so that a row of nothing else gives no NaN."""
LOG2_E = 1.4426950408889634

MaskOf = Callable[[int, int], mx.array | None]
"""(first, last + 1) query → bool mask that broadcasts to [B, H, queries, columns 0 … offset + last], or None where
the block is plainly causal."""


@mx.custom_function
def _power_of_two(x: mx.array) -> mx.array:
    """2^x. MLX's CPU kernel for it takes half the time of its `exp`."""
    return mx.power(2.0, x)


@_power_of_two.vjp
def _power_of_two_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output * (1.0 / LOG2_E)


def block_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask_of: MaskOf
) -> mx.array:
    """queries [B, H, L, d], keys and values [B, H_kv, S, d] with S ≥ L → [B, H, L, d]; query i sees columns up to
    S − L + i, and of those what its mask leaves."""
    batch, heads, length, width = queries.shape
    kinds, offset = keys.shape[1], keys.shape[2] - length
    group = heads // kinds
    grouped = (queries * (scale * LOG2_E)).reshape(batch, kinds, group, length, width)
    blocks = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        rows = last - first
        q = grouped[:, :, :, first:last].reshape(batch, kinds, group * rows, width)
        mask = mask_of(first, last)
        if mask is None:
            place = mx.arange(rows)
            triangle = place[:, None] >= place[None]
            cuts = [(0, offset + first, None), (offset + first, offset + last, triangle)]
        else:
            cuts = [(0, offset + last, mask)]
        scores = []
        for a, b, seen in cuts:
            if a == b:
                continue
            score = q @ keys[:, :, a:b].swapaxes(2, 3)
            if seen is not None:
                square = score.reshape(batch, kinds, group, rows, b - a)
                if seen.ndim == 4:  # [B, 1, rows, columns]
                    seen = seen[:, :, None]
                score = mx.where(seen, square, HIDDEN).reshape(score.shape)
            scores.append((a, b, score))
        top = mx.max(scores[0][2], -1, keepdims=True)
        for _, _, score in scores[1:]:
            top = mx.maximum(top, mx.max(score, -1, keepdims=True))
        top = mx.stop_gradient(top)
        total, mixed = None, None
        for a, b, score in scores:
            weight: Any = _power_of_two(score - top)
            part, sums = weight @ values[:, :, a:b], mx.sum(weight, -1, keepdims=True)
            mixed = part if mixed is None else mixed + part
            total = sums if total is None else total + sums
        blocks.append((mixed / total).reshape(batch, kinds, group, rows, width))  # type: ignore[operator]
    return mx.concatenate(blocks, axis=3).reshape(batch, heads, length, width)


def route(model: Any) -> int:
    """Let the model's attention ask its cache first: one that has `attend` computes it. Returns how many modules
    of mlx-lm were changed; for every other cache they do what they did."""
    changed = 0
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules[name]
        original = getattr(module, "scaled_dot_product_attention", None)
        if original is None or hasattr(original, "original"):
            continue
        module.scaled_dot_product_attention = _routed(original)  # type: ignore[attr-defined]
        changed += 1
    return changed


def _routed(original: Any) -> Any:
    def attention(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        **others: Any,
    ) -> mx.array:
        attend = getattr(cache, "attend", None)
        if attend is None or others.get("sinks") is not None:
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **others)
        return attend(queries, keys, values, scale, mask)

    attention.original = original  # type: ignore[attr-defined]
    return attention
