"""Stand-ins for mlx-lm's caches: they decide what a token attends to, and keep keys and values where needed.

mlx-lm's models ask the cache of a layer for its mask (`make_mask`), for the rotary offset of its first token
(`offset`) and hand it new keys and values [B, H_kv, N, d] (`update_and_fetch`). Objects of this module are made
anew for every forward pass, inside the traced function, so that gradients flow through what they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import mlx.core as mx

from instep.engines.mlx.attention import MaskOf, Shared, block_attention

Mask = Any
"""mx.array of bool, the word "causal", or None where one token sees everything."""


@dataclass(frozen=True)
class Masking:
    """What a model needs of its masks.

    `window` is a sliding window of all layers that the model itself does not ask for. `head_axes` is how many axes
    of heads its scores have: Gemma 2 of mlx-lm has two [B, H_kv, H / H_kv, L, S], and would silently take the rows
    of a mask [B, 1, L, S] for key heads. `attends`: its attention asks the cache (`attention.route`), so that keys
    and values that rows share need not be copied for each.
    """

    window: int | None = None
    head_axes: int = 1
    attends: bool = False

    def spread(self, mask: mx.array) -> mx.array:
        """[B, L, S] → one axis of length 1 for each axis of heads."""
        return mx.expand_dims(mask, list(range(1, 1 + self.head_axes)))


@dataclass(frozen=True)
class Within:
    """In the place of a mask, for a cache that computes the attention itself: the layer's window."""

    window: int | None


class _Blocks:
    """Attention of whole rows in blocks of queries, for models whose attention asks the cache (`attention.route`)."""

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        offset = keys.shape[2] - queries.shape[2]

        def mask_of(first: int, last: int) -> mx.array | None:
            return mask[..., first:last, : offset + last] if isinstance(mask, mx.array) else None

        return block_attention(queries, keys, values, scale, mask_of)


class Rows(_Blocks):
    """Rows that stand alone; all layers share one object. `segment` int32 [R, L], None where each row is one sample."""

    offset = 0

    def __init__(self, segment: mx.array | None, masking: Masking) -> None:
        self.segment, self.masking = segment, masking
        self._masks: dict[int | None, Mask] = {}

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Mask:
        window = window_size or self.masking.window
        if self.segment is None and not return_array and (window is None or count <= window):
            return "causal" if count > 1 else None
        if window not in self._masks:
            place = mx.arange(count)
            distance = place[:, None] - place[None]
            mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            if self.segment is not None:
                same = self.segment[:, :, None] == self.segment[:, None, :]
                mask = self.masking.spread(mask[None] & same)
            self._masks[window] = mask
        return self._masks[window]


class Prefix(_Blocks):
    """One for each layer. First it records the prefix [1, P'], whose tokens behind `length` are padding; after
    `continued` the rows' tokens see the first `length` of it and themselves, at positions from `length` on.
    """

    def __init__(self, length: mx.array, masking: Masking) -> None:
        self.length, self.masking = length, masking
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.forked = False
        self.offset: Any = 0

    def continued(self) -> Prefix:
        self.forked, self.offset = True, self.length
        return self

    def like(self, keys: mx.array | None, values: mx.array | None) -> Prefix:
        """One in the same state that holds other arrays (of a recomputed layer)."""
        twin = Prefix(self.length, self.masking)
        twin.keys, twin.values, twin.forked, twin.offset = keys, values, self.forked, self.offset
        return twin

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self.forked:
            self.keys, self.values = keys, values
            return keys, values
        assert self.keys is not None and self.values is not None
        if self.masking.attends:
            return keys, values
        joined = []
        for shared, own in ((self.keys, keys), (self.values, values)):
            spread = mx.broadcast_to(shared, (own.shape[0], *shared.shape[1:]))
            joined.append(mx.concatenate([spread, own], axis=2))
        return joined[0], joined[1]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Mask:
        window = window_size or self.masking.window
        if not self.forked:
            return Rows(None, self.masking).make_mask(count, return_array, window_size)
        if self.masking.attends:
            return _no_array(return_array, window)
        assert self.keys is not None
        width = self.keys.shape[2]
        column, row = mx.arange(width + count)[None], mx.arange(count)[:, None]
        own = column - width
        mask = mx.where(own < 0, column < self.length, own <= row)
        if window is not None:
            distance = self.length + row - mx.where(own < 0, column, own + self.length)
            mask = mask & (distance < window)
        return mask

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask
    ) -> mx.array:
        if not isinstance(mask, Within):
            return super().attend(queries, keys, values, scale, mask)
        assert self.keys is not None and self.values is not None
        window, column = mask.window, mx.arange(self.keys.shape[2])[None]

        def seen(first: int, last: int) -> mx.array:
            real = column < self.length
            if window is None:
                return real
            return real & (self.length + mx.arange(first, last)[:, None] - column < window)

        shared = Shared(self.keys, self.values, seen)
        return block_attention(queries, keys, values, scale, _own_columns(window, keys.shape[2]), shared)


def _no_array(return_array: bool, window: int | None) -> Within:
    if return_array:
        raise TypeError("the model works on its mask, so its attention cannot be left to the cache")
    return Within(window)


def _own_columns(window: int | None, count: int, place: int = 0) -> MaskOf:
    """What rows see of `count` own columns when the first query stands at column `place`."""

    def mask_of(first: int, last: int) -> mx.array | None:
        if window is None or count <= window:
            return None
        row, column = mx.arange(first, last)[:, None] + place, mx.arange(place + last)[None]
        return (column <= row) & (row - column < window)

    return mask_of


class Place:
    """Where the rows of a generation stand: which prompt each continues, the prompts' lengths int32 [B] and common
    width, own tokens so far. Rows of one prompt lie together."""

    def __init__(self, prompts: Sequence[int], lengths: Sequence[int]) -> None:
        self.prompts = list(prompts)
        self.width = max(lengths)
        self.even = min(lengths) == self.width
        self.lengths = mx.array(list(lengths), mx.int32)
        self.count = 0

    def keep(self, rows: Sequence[int]) -> None:
        self.prompts = [self.prompts[row] for row in rows]
        self.lengths = self.lengths[mx.array(list(rows))]

    def groups(self) -> list[tuple[int, int, int]]:
        """(prompt, first row, last row + 1) of each prompt's rows."""
        found, first = [], 0
        for prompt, rows in groupby(self.prompts):
            last = first + len(list(rows))
            found.append((prompt, first, last))
            first = last
        return found


GROWTH = 128  # columns that a cache grows by


class Decode:
    """One for each layer: a row's prompt in columns 0 … width-1 (padded on the right), its own tokens behind."""

    def __init__(self, place: Place, keys: mx.array, values: mx.array, masking: Masking) -> None:
        self.place, self.masking = place, masking
        self.keys, self.values = keys, values

    @property
    def offset(self) -> mx.array:
        return self.place.lengths + self.place.count

    def keep(self, rows: mx.array) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]

    @property
    def first_own(self) -> int:
        """Column of a row's first own token."""
        return self.place.width

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at = self.first_own + self.place.count
        if at >= self.keys.shape[2]:
            for name in ("keys", "values"):
                old = getattr(self, name)
                room = mx.zeros((*old.shape[:2], GROWTH, old.shape[3]), old.dtype)
                setattr(self, name, mx.concatenate([old, room], axis=2))
        self.keys[:, :, at : at + 1] = keys
        self.values[:, :, at : at + 1] = values
        return self.keys[:, :, : at + 1], self.values[:, :, : at + 1]

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Mask:
        place, window = self.place, window_size or self.masking.window
        total = place.width + place.count + count
        if place.even and not return_array and (window is None or total <= window):
            return None
        column, own = mx.arange(total)[None], mx.arange(total)[None] - place.width
        lengths = place.lengths[:, None]
        mask = mx.where(own < 0, column < lengths, True)
        if window is not None:
            distance = lengths + place.count - mx.where(own < 0, column, own + lengths)
            mask = mask & (distance < window)
        return self.masking.spread(mask[:, None])


class SharedDecode(Decode):
    """`Decode` where the model's attention asks the cache: each prompt's keys and values are there once, and those
    of a row are its own tokens' only (the idea of Hydragen, arXiv 2402.05099)."""

    def __init__(self, place: Place, prompts: Mapping[int, Prefix], rows: int, masking: Masking) -> None:
        self.recorded = prompts
        some = next(iter(prompts.values())).keys
        assert some is not None
        room = (rows, some.shape[1], GROWTH, some.shape[3])
        super().__init__(place, mx.zeros(room, some.dtype), mx.zeros(room, some.dtype), masking)

    @property
    def first_own(self) -> int:
        return 0

    def make_mask(
        self, count: int, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Mask:
        return _no_array(return_array, window_size or self.masking.window)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Within
    ) -> mx.array:
        own = _own_columns(mask.window, keys.shape[2], keys.shape[2] - 1)
        parts = []
        for prompt, first, last in self.place.groups():
            recorded, count = self.recorded[prompt], self.place.count
            assert recorded.keys is not None and recorded.values is not None
            hidden = 0 if mask.window is None else max(0, recorded.keys.shape[2] + count + 1 - mask.window)
            shared = None
            if hidden < recorded.keys.shape[2]:
                shared = Shared(recorded.keys[:, :, hidden:], recorded.values[:, :, hidden:], lambda *_: None)
            rows = slice(first, last)
            parts.append(block_attention(queries[rows], keys[rows], values[rows], scale, own, shared))
        return mx.concatenate(parts)
