"""Attention over spans of a flat row, behind transformers' AttentionInterface.

On the CPU no mask tensor is built: a forward pass is a list of tiles (queries × keys), and tiles that share
queries are merged through their log-sum-exp, so that a shared prefix is attended to where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from instep.engines.torch.blocks import block_attention
from instep.engines.torch.layout import Layout

IMPLEMENTATION = "instep"


def register() -> None:
    """Name our attention to transformers. It registers no mask function, so that no mask tensor is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)


@dataclass(frozen=True)
class Tile:
    """Queries q0 … q1-1 against keys k0 … k1-1; query q0 stands `offset` positions behind key k0.

    Query i sees key j where 0 ≤ (i − q0) − (j − k0) + offset < window.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    offset: int = 0

    @property
    def reach(self) -> int:
        """Greatest distance between a query and a key that it may see."""
        return self.q1 - self.q0 - 1 + self.offset


class Plan:
    """What the attention of one forward pass needs to know; handed to every layer as a keyword."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._masks: dict[Any, torch.Tensor | None] = {}

    def tiles(self, window: int | None) -> list[Tile]:
        """Own tiles first; the queries of all spans share one tile on the prefix where no window bites."""
        spans, prefix = self.layout.spans, self.layout.prefix
        tiles = [Tile(s.start, s.stop, s.start, s.stop) for s in spans]
        rows = [s for s in spans if s.prefix]
        if not rows:
            return tiles
        if window is None or all(prefix + s.stop - s.start <= window for s in rows):
            # Every query stands behind the whole prefix, so that its exact distance does not matter.
            return [*tiles, Tile(rows[0].start, rows[-1].stop, 0, prefix, prefix)]
        return tiles + [Tile(s.start, s.stop, 0, prefix, prefix) for s in rows]

    def mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        """For a grid layout: bool [R, 1, L, P + L], true where a query sees a key; None for plain causal rows."""
        layout = self.layout
        assert layout.grid is not None and layout.segment is not None
        rows, length = layout.grid
        if window is not None and window >= layout.prefix + length:
            window = None
        if window not in self._masks:
            segment = torch.from_numpy(layout.segment).to(device)
            if window is None and not layout.prefix and int(layout.segment.max(initial=0)) <= 1:
                self._masks[window] = None
            else:
                i = torch.arange(length, device=device)
                own = (segment[:, :, None] == segment[:, None, :]) & (i[:, None] >= i[None, :])
                distance = i[:, None] - i[None, :]
                if window is not None:
                    own &= distance < window
                if layout.prefix:
                    j = torch.arange(layout.prefix, device=device)
                    place = torch.from_numpy(layout.position[layout.prefix :].reshape(rows, length)).to(
                        device
                    )
                    seen = (segment > 0)[:, :, None].expand(-1, -1, layout.prefix)
                    if window is not None:
                        seen = seen & (place[:, :, None] - j < window)
                    own = torch.cat([seen, own], 2)
                self._masks[window] = own[:, None]
        return self._masks[window]


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, d], key and value [1, H_kv, N, d] → output [1, N, H, d].

    `plan` is a Plan, or whatever else has `attend(module, query, key, value, scale, window, softcap)`.
    """
    if plan is None:
        raise RuntimeError(
            "the attention of a layer was called without a plan: its model drops unknown keywords"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if not isinstance(plan, Plan):
        return plan.attend(module, query, key, value, scale, sliding_window, softcap), None
    if softcap is not None:
        return _naive(query, key, value, plan, scale, sliding_window, softcap), None
    if plan.layout.grid is not None:
        return _grid(query, key, value, plan, scale, sliding_window), None
    if query.device.type != "cpu":
        return _naive(query, key, value, plan, scale, sliding_window, None), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return block_attention(q, k, v, plan.tiles(sliding_window), scale, sliding_window)[None], None


def _grid(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan, scale: float, window: int | None
) -> torch.Tensor:
    """Rows of fixed length with scaled_dot_product_attention; the prefix is a row of its own."""
    assert plan.layout.grid is not None
    rows, length = plan.layout.grid
    prefix = plan.layout.prefix
    heads = query.shape[1]

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = x[0, :, prefix:].unflatten(1, (rows, length)).transpose(0, 1)
        return x[:, :, :prefix], own

    (pq, q), (pk, k), (pv, v) = split(query), split(key), split(value)
    outputs = []
    if prefix:
        i = torch.arange(prefix, device=query.device)
        seen = None
        if window is not None and window < prefix:
            seen = (i[:, None] >= i) & (i[:, None] - i < window)
        outputs.append(
            F.scaled_dot_product_attention(
                pq, pk, pv, seen, is_causal=seen is None, scale=scale, enable_gqa=True
            )
        )
        k = torch.cat([pk.expand(rows, -1, -1, -1), k], 2)
        v = torch.cat([pv.expand(rows, -1, -1, -1), v], 2)
    mask = plan.mask(window, query.device)
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    outputs.append(o.transpose(0, 1).reshape(1, heads, rows * length, -1))
    return torch.cat(outputs, 2).transpose(1, 2)


def _naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: Plan,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Span by span with all its scores alive: for scores that are capped (Gemma-2), and prompts on a GPU."""
    groups = query.shape[1] // key.shape[1]
    pieces, at = [], 0
    for span in sorted(plan.layout.spans, key=lambda s: s.start):
        pieces.append(torch.zeros_like(query[:, :, at : span.start]))
        own = slice(span.start, span.stop)
        k = torch.cat([key[:, :, : span.prefix], key[:, :, own]], 2).repeat_interleave(groups, 1)
        v = torch.cat([value[:, :, : span.prefix], value[:, :, own]], 2).repeat_interleave(groups, 1)
        i = torch.arange(span.stop - span.start, device=query.device)[:, None] + span.prefix
        distance = i - torch.arange(k.shape[2], device=query.device)
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        scores = (query[:, :, own] @ k.transpose(2, 3)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = torch.softmax(scores.float().masked_fill(hidden, float("-inf")), -1).to(query.dtype)
        pieces.append(weights @ v)
        at = span.stop
    pieces.append(torch.zeros_like(query[:, :, at:]))
    return torch.cat(pieces, 2).transpose(1, 2)
