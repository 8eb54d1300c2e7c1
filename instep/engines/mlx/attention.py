"""Causal attention in blocks of queries, for CPUs: half of the scores, one exponential each.

On a CPU `mx.fast.scaled_dot_product_attention` computes the whole square of scores, and again in the backward
pass; exponentials and other elementwise passes over it take longer there than the products. On Metal and CUDA
mlx-lm's own call is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Shared:
    """Keys and values [1, H_kv, P, d] that all rows attend to before their own; `seen(first, last + 1)` is a bool
    mask that broadcasts to [queries, P], or None where all of them are seen."""

    keys: mx.array
    values: mx.array
    seen: MaskOf


@mx.custom_function
def _power_of_two(x: mx.array) -> Any:
    """2^x. MLX's CPU kernel for it takes half the time of its `exp`."""
    return mx.power(2.0, x)


@_power_of_two.vjp
def _power_of_two_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output * (1.0 / LOG2_E)


def block_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask_of: MaskOf,
    shared: Shared | None = None,
) -> mx.array:
    """queries [B, H, L, d], keys and values [B, H_kv, S, d] with S ≥ L → [B, H, L, d]; query i sees columns up to
    S − L + i, and of those what its mask leaves; before them what all rows share."""
    batch, heads, length, width = queries.shape
    kinds, offset = keys.shape[1], keys.shape[2] - length
    group = heads // kinds
    grouped = (queries * (scale * LOG2_E)).reshape(batch, kinds, group, length, width)
    blocks = []
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        rows = last - first
        q = grouped[:, :, :, first:last].reshape(batch, kinds, group * rows, width)
        parts = [
            (_masked(q @ keys[:, :, a:b].swapaxes(2, 3), seen, rows), values[:, :, a:b])
            for a, b, seen in _cuts(offset, first, last, mask_of(first, last))
        ]
        tops = [mx.max(score, -1, keepdims=True) for score, _ in parts]
        if shared is not None:
            common = _masked(_together(q) @ shared.keys.swapaxes(2, 3), shared.seen(first, last), rows)
            tops.append(_apart(mx.max(common, -1, keepdims=True), batch))
        top = tops[0]
        for other in tops[1:]:
            top = mx.maximum(top, other)
        top = mx.stop_gradient(top)
        weights: list[Any] = [_power_of_two(score - top) for score, _ in parts]
        total = [mx.sum(weight, -1, keepdims=True) for weight in weights]
        mixed = [weight @ part for weight, (_, part) in zip(weights, parts, strict=True)]
        if shared is not None:
            weight: Any = _power_of_two(common - _together(top))
            total.append(_apart(mx.sum(weight, -1, keepdims=True), batch))
            mixed.append(_apart(weight @ shared.values, batch))
        blocks.append((sum(mixed) / sum(total)).reshape(batch, kinds, group, rows, width))  # type: ignore[operator]
    return mx.concatenate(blocks, axis=3).reshape(batch, heads, length, width)


def _cuts(
    offset: int, first: int, last: int, mask: mx.array | None
) -> list[tuple[int, int, mx.array | None]]:
    """(first, last + 1 column, what is seen of them): without a mask only the block's own square needs one."""
    if mask is not None:
        return [(0, offset + last, mask)]
    place = mx.arange(last - first)
    square = (offset + first, offset + last, place[:, None] >= place[None] if last - first > 1 else None)
    return [square] if offset + first == 0 else [(0, offset + first, None), square]


def _masked(score: mx.array, seen: mx.array | None, rows: int) -> mx.array:
    """score [B, H_kv, n·rows, columns] with what is not seen hidden."""
    if seen is None:
        return score
    batch, kinds, _, columns = score.shape
    if seen.ndim == 4:  # [B, 1, rows, columns]
        seen = seen[:, :, None]
    return mx.where(seen, score.reshape(batch, kinds, -1, rows, columns), HIDDEN).reshape(score.shape)


def _together(x: mx.array) -> mx.array:
    """[B, H_kv, n, w] → [1, H_kv, B·n, w]: one product for all rows."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])


def _apart(x: mx.array, batch: int) -> mx.array:
    """[1, H_kv, B·n, w] → [B, H_kv, n, w]."""
    return x.reshape(x.shape[1], batch, -1, x.shape[3]).swapaxes(0, 1)


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
