"""Attention on the CPU: torch's flash kernel forward, plain matrix products over blocks of queries backward.

The forward pass keeps the output and the log-sum-exp; the backward pass recomputes the probabilities block by
block (FlashAttention-2, arXiv 2307.08691). Queries are laid out as [H_kv, N·G, d], so that the G query heads of
one key head are rows of one product and keys are never repeated. The log-sum-exp and the row sums of dO·O enter
the products as two more columns each (a high and a low half in 16-bit types), which leaves `exp` in place and one
multiplication as the only elementwise work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

QUERY_BLOCK = 256


class TileLike(Protocol):
    @property
    def q0(self) -> int: ...
    @property
    def q1(self) -> int: ...
    @property
    def k0(self) -> int: ...
    @property
    def k1(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def reach(self) -> int: ...


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[TileLike],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """q [N, H, d], k and v [N, H_kv, d] → [N, H, d]; zero where no tile has the query."""
    return _BlockAttention.apply(q, k, v, tiles, scale, window)  # type: ignore[return-value]


def _query_blocks(tile: TileLike, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """(a, b, low, high): queries a … b-1 of the tile and the keys low … high-1 that one of them may see."""
    keys = tile.k1 - tile.k0
    queries = tile.q1 - tile.q0
    if window is not None:  # behind the window of the last key nothing is seen
        queries = min(queries, window + keys - 1 - tile.offset)
    for a in range(0, queries, QUERY_BLOCK):
        b = min(a + QUERY_BLOCK, queries)
        high = min(keys, b + tile.offset)
        low = 0 if window is None else max(0, a + tile.offset - window + 1)
        if low < high:
            yield a, b, low, high


def _hide(scores: torch.Tensor, tile: TileLike, block: tuple[int, int, int, int], window: int | None) -> None:
    """Set −inf where a key is ahead of its query or outside the window. scores [H_kv, b-a, G, high-low]."""
    a, b, low, high = block
    first = a + tile.offset + 1  # keys before it are seen by every query of the block, as far as order goes
    i = torch.arange(a, b)[:, None] + tile.offset
    if high > first:
        start = max(low, first)
        ahead = torch.arange(start, high)[None] > i
        scores[..., start - low :].masked_fill_(ahead[:, None], float("-inf"))
    if window is not None and low <= b - 1 + tile.offset - window:
        stop = min(high, b + tile.offset - window)
        behind = torch.arange(low, stop)[None] <= i - window
        scores[..., : stop - low].masked_fill_(behind[:, None], float("-inf"))


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, H_kv, G, d], k, v [m, H_kv, d] → output as q, log-sum-exp [n, H_kv, G]; keys expanded without a copy."""
    groups = q.shape[2]
    kv = (x.transpose(0, 1)[:, None].expand(-1, groups, -1, -1) for x in (k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.permute(1, 2, 0, 3), *kv, 0.0, causal, scale=scale
    )
    return o.permute(2, 0, 1, 3), lse.permute(2, 0, 1)


def _windowed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: TileLike, scale: float, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_flash`, for a tile in which the window bites."""
    n, heads, groups, width = q.shape
    output = torch.zeros(n, heads, groups, width, dtype=q.dtype)
    lse = torch.full((n, heads, groups), float("-inf"))
    for a, b, low, high in _query_blocks(tile, window):
        rows = (q[a:b] * scale).transpose(0, 1).reshape(heads, (b - a) * groups, width)
        scores = torch.bmm(rows, k[low:high].permute(1, 2, 0)).float()
        _hide(scores.view(heads, b - a, groups, -1), tile, (a, b, low, high), window)
        total = torch.logsumexp(scores, -1, keepdim=True)
        weights = scores.sub_(total).exp_().to(q.dtype)
        output[a:b] = (
            torch.bmm(weights, v[low:high].transpose(0, 1)).view(heads, b - a, groups, width).transpose(0, 1)
        )
        lse[a:b] = total.view(heads, b - a, groups).transpose(0, 1)
    return output, lse


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tiles: Sequence[TileLike],
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [N, H_kv, G, d] → output as q, log-sum-exp [N, H_kv, G] over all tiles of a query."""
    output, total = torch.zeros(q.shape, dtype=q.dtype), torch.full(q.shape[:3], float("-inf"))
    for tile in tiles:
        own, keys = slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
        if window is not None and tile.reach >= window:
            o, lse = _windowed(q[own], k[keys], v[keys], tile, scale, window)
        else:
            o, lse = _flash(q[own], k[keys], v[keys], tile.offset == 0, scale)
        before = total[own]
        if tile.offset == 0:  # own tiles come first, and no two of them share a query
            output[own], total[own] = o, lse
            continue
        both = torch.logaddexp(before, lse)
        merged = output[own].float().mul_((before - both).exp_()[..., None])
        merged.addcmul_(o.float(), (lse - both).exp_()[..., None])
        output[own], total[own] = merged, both
    return output, total


def _augment(x: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
    """[N, H_kv, (G,) d] → [H_kv, N·(G), d + 2]: the last two columns are `extra` split in two, or ones."""
    wide = torch.empty(x.shape[1], x.shape[0], *x.shape[2:-1], x.shape[-1] + 2, dtype=x.dtype)
    wide[..., :-2] = x.transpose(0, 1)
    if extra is None:
        wide[..., -2:] = 1
    else:
        value = extra.transpose(0, 1)
        high = value.to(x.dtype)
        wide[..., -2] = high
        wide[..., -1] = value - high.float()
    return wide.flatten(1, -2)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Sequence[TileLike],
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        # The flash kernel reads the last axis as contiguous, whatever its stride.
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        output, lse = _forward(q.unflatten(1, (k.shape[1], -1)), k, v, tiles, scale, window)
        output = output.flatten(1, 2)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.settings = (tiles, scale, window)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, output, lse = ctx.saved_tensors
        tiles, scale, window = ctx.settings
        shape = (k.shape[1], q.shape[1] // k.shape[1])
        heads, groups, width = *shape, q.shape[-1]
        tokens = q.shape[0]
        delta = (grad.float() * output.float()).sum(-1).unflatten(1, shape)
        # A query that sees nothing (padding) has no log-sum-exp; its probabilities are never formed.
        rows = _augment((q * scale).unflatten(1, shape), -lse)
        grads = _augment(grad.unflatten(1, shape), -delta)
        keys, values = _augment(k, None), _augment(v, None)
        plain_keys = keys[..., :width].contiguous()
        rows_t = rows[..., :width].transpose(1, 2).contiguous()
        grads_t = grads[..., :width].transpose(1, 2).contiguous()
        grad_rows = torch.zeros(heads, tokens * groups, width, dtype=q.dtype)
        grad_keys_t = torch.zeros(heads, width, tokens)
        grad_values_t = torch.zeros(heads, width, tokens)
        for tile in tiles:
            for block in _query_blocks(tile, window):
                a, b, low, high = block
                at = slice((tile.q0 + a) * groups, (tile.q0 + b) * groups)
                of = slice(tile.k0 + low, tile.k0 + high)
                p = torch.bmm(rows[:, at], keys[:, of].transpose(1, 2))
                _hide(p.view(heads, b - a, groups, high - low), tile, block, window)
                p.exp_()
                grad_values_t[:, :, of] += torch.bmm(grads_t[:, :, at], p)
                ds = torch.bmm(grads[:, at], values[:, of].transpose(1, 2)).mul_(p)
                del p
                grad_rows[:, at] += torch.bmm(ds, plain_keys[:, of])
                grad_keys_t[:, :, of] += torch.bmm(rows_t[:, :, at], ds)
                del ds
        grad_q = grad_rows.mul_(scale).view(heads, tokens, groups, width).transpose(0, 1).flatten(1, 2)
        grad_k, grad_v = (x.permute(2, 0, 1).to(q.dtype) for x in (grad_keys_t, grad_values_t))
        return grad_q, grad_k, grad_v, None, None, None
