"""Attention over spans of a flat row, behind transformers' AttentionInterface; no mask tensor on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from instep.engines.torch.layout import Layout

IMPLEMENTATION = "instep"


def register() -> None:
    """Name our attention to transformers. It registers no mask function, so that no mask tensor is built."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attend)


class Plan:
    """What the attention of one forward pass needs to know; handed to every layer as a keyword."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    plan: Plan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, N, d], key and value [1, H_kv, N, d] → output [1, N, H, d]."""
    if plan is None:
        raise RuntimeError("attention was called without a plan")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.zeros_like(query)
    for span in plan.layout.spans:
        q = query[:, :, span.start : span.stop]
        k, v = key[:, :, span.start : span.stop], value[:, :, span.start : span.stop]
        mask = None
        if span.prefix:
            k = torch.cat([key[:, :, : span.prefix], k], 2)
            v = torch.cat([value[:, :, : span.prefix], v], 2)
        if span.prefix or sliding_window:
            i = torch.arange(q.shape[2])[:, None] + span.prefix
            j = torch.arange(k.shape[2])[None]
            mask = (j <= i) if not sliding_window else (j <= i) & (j > i - sliding_window)
        o = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        output = torch.cat([output[:, :, : span.start], o, output[:, :, span.stop :]], 2)
    return output.transpose(1, 2), None
