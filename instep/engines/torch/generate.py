"""Sampling completions: each prompt is run once, its n rows read its keys and values where they lie.

The rows' own keys and values are in a preallocated cache of this module; finished rows leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from instep.engines.base import Sampling
from instep.engines.decoding import Row, advance, rows_of
from instep.engines.torch.attention import Plan, attend
from instep.engines.torch.layout import Layout, Span
from instep.records import Rollout

FIRST_CAPACITY = 64  # own tokens per row that the cache first has room for; doubled when full
ROWS_AT_ONCE = 64


class _Prefill:
    """Attention of the prompts (spans of a flat row) that keeps every layer's keys and values."""

    def __init__(self, layout: Layout) -> None:
        self.plan = Plan(layout)
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        self.kept[module.layer_idx] = (key[0].contiguous(), value[0].contiguous())
        return attend(module, query, key, value, None, scale, window, softcap, plan=self.plan)[0]


class _Decode:
    """Attention of one new token for each of B rows: the shared prompt, then the row's own earlier tokens.

    Caches per layer: own keys and values [rows, H_kv, capacity, d]; prompts' [H_kv, P, d] from the prefill.
    """

    def __init__(
        self, kept: dict[int, tuple[torch.Tensor, torch.Tensor]], spans: Sequence[Span], rows: int
    ) -> None:
        self.prompt = {
            layer: [(k[:, s.start : s.stop], v[:, s.start : s.stop]) for s in spans]
            for layer, (k, v) in kept.items()
        }
        self.capacity = FIRST_CAPACITY
        self.length = 0  # own tokens in the cache, the same for every row
        self.groups: list[tuple[int, int, int]] = []  # (prompt, first row, last row + 1)
        self.own = {
            layer: tuple(x.new_zeros(rows, x.shape[0], self.capacity, x.shape[2]) for x in pair)
            for layer, pair in kept.items()
        }

    def arrange(self, prompts: Sequence[int]) -> None:
        """Rows of one prompt stand together; note where."""
        self.groups = []
        for row, prompt in enumerate(prompts):
            if self.groups and self.groups[-1][0] == prompt:
                self.groups[-1] = (prompt, self.groups[-1][1], row + 1)
            else:
                self.groups.append((prompt, row, row + 1))

    def keep(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=next(iter(self.own.values()))[0].device)
        self.own = {layer: tuple(x[index] for x in pair) for layer, pair in self.own.items()}

    def room(self) -> None:
        if self.length < self.capacity:
            return
        self.capacity *= 2
        for layer, pair in self.own.items():
            grown = tuple(x.new_zeros(*x.shape[:2], self.capacity, x.shape[3]) for x in pair)
            for new, old in zip(grown, pair, strict=True):
                new[:, :, : self.length] = old
            self.own[layer] = grown

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query [1, H, B, d], key and value [1, H_kv, B, d] → [1, B, H, d]."""
        layer = module.layer_idx
        keys, values = self.own[layer]
        t = self.length
        keys[:, :, t] = key[0].transpose(0, 1)
        values[:, :, t] = value[0].transpose(0, 1)
        rows, heads, width = query.shape[2], key.shape[1], query.shape[3]
        # [B, H_kv, G, d]: the query heads of one key head are rows of one product.
        q = query[0].transpose(0, 1).reshape(rows, heads, -1, width)
        first = 0 if window is None else max(0, t - window + 1)
        own = (keys[:, :, first : t + 1], values[:, :, first : t + 1])
        prompts = []
        for prompt, a, b in self.groups:
            pk, pv = self.prompt[layer][prompt]
            low = 0 if window is None else min(pk.shape[1], max(0, pk.shape[1] + t - window + 1))
            prompts.append((a, b, pk[:, low:], pv[:, low:]))
        if softcap is None and q.device.type == "cpu":
            output = _merged(q, own, prompts, scale)
        else:
            output = _plain(q, own, prompts, scale, softcap)
        return output.reshape(1, rows, -1, width)


Pair = tuple[torch.Tensor, torch.Tensor]


def _merged(
    q: torch.Tensor, own: Pair, prompts: Sequence[tuple[int, int, torch.Tensor, torch.Tensor]], scale: float
) -> torch.Tensor:
    """q [B, H_kv, G, d] against each row's own keys and values [B, H_kv, t, d] and, for rows a … b-1, those of
    their prompt [H_kv, P, d]: torch's CPU flash kernel on each, merged through their log-sum-exp."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    _, heads, groups, width = q.shape
    output, own_lse = flash(q, *own, 0.0, False, scale=scale)
    if not any(pk.shape[1] for _, _, pk, _ in prompts):  # a window leaves all prompts at the same step
        return output
    by_head = q.transpose(0, 1).contiguous()
    parts = [
        flash(by_head[:, a:b].reshape(1, heads, -1, width), pk[None], pv[None], 0.0, False, scale=scale)
        for a, b, pk, pv in prompts
    ]
    shared = torch.cat([o.view(heads, -1, groups, width) for o, _ in parts], 1).transpose(0, 1)
    lse = torch.cat([lse.view(heads, -1, groups) for _, lse in parts], 1).transpose(0, 1)
    return torch.lerp(shared.float(), output.float(), torch.sigmoid(own_lse - lse)[..., None]).to(q.dtype)


def _plain(
    q: torch.Tensor,
    own: Pair,
    prompts: Sequence[tuple[int, int, torch.Tensor, torch.Tensor]],
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """The same as matrix products, on any device and with scores that are capped."""
    heads, groups, width = q.shape[1:]
    q = q * scale
    output = torch.empty_like(q)
    of_own = torch.matmul(q, own[0].transpose(2, 3)).float()
    for a, b, pk, pv in prompts:
        ours = q[a:b].transpose(0, 1).reshape(heads, (b - a) * groups, width)
        shared = torch.bmm(ours, pk.transpose(1, 2)).float()
        shared = shared.view(heads, b - a, groups, -1).transpose(0, 1)
        scores = torch.cat([shared, of_own[a:b]], -1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weight = torch.softmax(scores, -1).to(q.dtype)
        split = shared.shape[-1]
        of_prompt = weight[..., :split].transpose(0, 1).reshape(heads, (b - a) * groups, split)
        mixed = torch.bmm(of_prompt, pv).view(heads, b - a, groups, width).transpose(0, 1)
        output[a:b] = mixed + torch.matmul(weight[..., split:], own[1][a:b])
    return output


class Generator:
    """Draws completions from a decoder and its head. `hidden(tokens, position, plan)` gives [N, D];
    `logits(hidden [K, D])` float32 numpy [K, V]."""

    def __init__(
        self,
        hidden: Callable[[np.ndarray, np.ndarray, Any], torch.Tensor],
        logits: Callable[[torch.Tensor], np.ndarray],
    ) -> None:
        self._hidden, self._logits = hidden, logits

    def __call__(
        self,
        prompts: Sequence[np.ndarray],
        n: int,
        sampling: Sampling,
        keys: Sequence[int],
        stop_text: Callable[[np.ndarray], bool] | None,
        on_token: Callable[[int, int, int], None] | None,
    ) -> list[list[Rollout]]:
        rows = rows_of(len(prompts), n, sampling, keys)
        together = max(1, ROWS_AT_ONCE // n) * n  # whole prompts, so that each is run once
        for a in range(0, len(rows), together):
            self._run(prompts, rows[a : a + together], sampling, stop_text, on_token)
        done = [row.rollout() for row in rows]
        return [done[p * n : (p + 1) * n] for p in range(len(prompts))]

    def _run(
        self,
        prompts: Sequence[np.ndarray],
        rows: list[Row],
        sampling: Sampling,
        stop_text: Callable[[np.ndarray], bool] | None,
        on_token: Callable[[int, int, int], None] | None,
    ) -> None:
        used = sorted({row.prompt for row in rows})
        place = {prompt: i for i, prompt in enumerate(used)}
        tokens = np.concatenate([prompts[p] for p in used]).astype(np.int32)
        position = np.concatenate([np.arange(len(prompts[p])) for p in used]).astype(np.int32)
        ends = np.cumsum([len(prompts[p]) for p in used])
        spans = tuple(Span(int(e) - len(prompts[p]), int(e)) for p, e in zip(used, ends, strict=True))
        prefill = _Prefill(Layout(tokens, position, np.asarray(ends - 1), spans))
        last = self._hidden(tokens, position, prefill)[torch.as_tensor(ends - 1)]
        logits = self._logits(last)[[place[row.prompt] for row in rows]]
        decode = _Decode(prefill.kept, spans, len(rows))
        active = rows
        while True:
            advance(active, logits, sampling, stop_text, on_token)
            kept = [i for i, row in enumerate(active) if row.stop is None]
            if not kept:
                return
            if len(kept) < len(active):
                decode.keep(kept)
                active = [active[i] for i in kept]
            decode.arrange([place[row.prompt] for row in active])
            decode.room()
            new = np.array([row.ids[-1] for row in active], np.int32)
            where = np.array([len(prompts[row.prompt]) + len(row.ids) - 1 for row in active], np.int32)
            logits = self._logits(self._hidden(new, where, decode))
            decode.length += 1
