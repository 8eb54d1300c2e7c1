"""How a batch is laid out for the device: tokens in one flat row, and which spans of it attend to what."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from instep.records import Batch


@dataclass(frozen=True)
class Span:
    """Tokens start … stop-1 of the flat row: they attend causally to themselves, and to tokens 0 … prefix-1."""

    start: int
    stop: int
    prefix: int = 0


@dataclass(frozen=True)
class Layout:
    """A flat row of N tokens.

    tokens, position int32 [N]; site int64 [K]: index into N of each site; spans cover every token whose
    output matters. `grid` is (R, L) where the N tokens are a prefix and then R rows of L tokens each, padding
    included (fixed shapes), with `segment` int32 [R, L]; None where padding was left out.
    """

    tokens: np.ndarray
    position: np.ndarray
    site: np.ndarray
    spans: tuple[Span, ...]
    prefix: int = 0
    grid: tuple[int, int] | None = None
    segment: np.ndarray | None = None


def _segments(row: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of each run of one segment number > 0 in a row int32 [L]."""
    edges = np.flatnonzero(np.diff(row)) + 1
    bounds = [0, *edges.tolist(), len(row)]
    return [(a, b) for a, b in pairwise(bounds) if row[a] > 0]


def compact(batch: Batch, site: np.ndarray) -> Layout:
    """Only the tokens that a site can see: no padding, and nothing after the last site of a segment.

    Attention is causal, so what stands behind the last site has no influence on any log-probability.
    A site on padding is mapped to token 0 of the layout (its weight is 0).
    """
    length = batch.tokens.shape[1]
    prefix = 0 if batch.prefix is None else len(batch.prefix)
    tokens = [batch.prefix] if batch.prefix is not None else []
    position = [np.arange(prefix, dtype=np.int32)] if prefix else []
    spans = [Span(0, prefix)] if prefix else []
    index = np.full(batch.tokens.size, -1, np.int64)
    ordered = np.sort(site)
    at = prefix
    for r in range(batch.tokens.shape[0]):
        for a, b in _segments(batch.segment[r]):
            low, high = r * length + a, r * length + b
            k = np.searchsorted(ordered, high)
            if k == 0 or ordered[k - 1] < low:
                continue
            keep = int(ordered[k - 1]) - low + 1
            tokens.append(batch.tokens[r, a : a + keep])
            position.append(batch.position[r, a : a + keep])
            index[low : low + keep] = np.arange(at, at + keep)
            spans.append(Span(at, at + keep, prefix))
            at += keep
    if at == prefix:  # nothing but padding: one token keeps every shape valid
        tokens.append(batch.tokens[0, :1])
        position.append(np.zeros(1, np.int32))
        spans.append(Span(at, at + 1))
    return Layout(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(position).astype(np.int32),
        np.maximum(index[site], 0),
        tuple(spans),
        prefix,
    )


def fixed(batch: Batch, site: np.ndarray) -> Layout:
    """All R·L tokens, padding included, behind the prefix: few shapes, for devices that cache by shape."""
    rows, length = batch.tokens.shape
    prefix = 0 if batch.prefix is None else len(batch.prefix)
    head = np.zeros(0, np.int32) if batch.prefix is None else batch.prefix
    spans = [Span(0, prefix)] if prefix else []
    for r in range(rows):
        base = prefix + r * length
        spans += [Span(base + a, base + b, prefix) for a, b in _segments(batch.segment[r])]
    return Layout(
        np.concatenate([head, batch.tokens.reshape(-1)]).astype(np.int32),
        np.concatenate([np.arange(prefix), batch.position.reshape(-1)]).astype(np.int32),
        site.astype(np.int64) + prefix,
        tuple(spans),
        prefix,
        (rows, length),
        batch.segment,
    )
