"""Sampling completions: each prompt is run once, its rows are decoded together, finished rows leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from instep.engines.base import Sampling
from instep.engines.decoding import Row, advance, rows_of
from instep.engines.mlx.caches import GROWTH, Decode, Masking, Place, Prefix, SharedDecode
from instep.records import Rollout

ROWS_AT_ONCE = 64

Hidden = Callable[[mx.array, Sequence[Any]], mx.array]


class Generator:
    """`hidden(tokens [R, N], caches)` gives [R, N, D]; `head(hidden [R, N, D])` logits [R, N, V]."""

    def __init__(self, hidden: Hidden, head: Callable[[mx.array], mx.array], layers: int, masking: Masking):
        self._hidden, self._head, self._layers, self._masking = hidden, head, layers, masking

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
        for start in range(0, len(rows), together):
            self._run(prompts, rows[start : start + together], sampling, stop_text, on_token)
        done = [row.rollout() for row in rows]
        return [done[p * n : (p + 1) * n] for p in range(len(prompts))]

    def _logits(self, hidden: mx.array) -> np.ndarray:
        """hidden [B, 1, D] → float32 [B, V]."""
        return np.array(self._head(hidden)[:, 0].astype(mx.float32))

    def _prefill(self, prompt: np.ndarray) -> tuple[list[Prefix], mx.array]:
        """Keys and values of every layer, and the last token's hidden state [1, 1, D]."""
        caches = [Prefix(mx.array(len(prompt)), self._masking) for _ in range(self._layers)]
        last = self._hidden(mx.array(prompt[None]), caches)[:, -1:]
        mx.eval(last, [(cache.keys, cache.values) for cache in caches])
        return caches, last

    def _run(
        self,
        prompts: Sequence[np.ndarray],
        rows: Sequence[Row],
        sampling: Sampling,
        stop_text: Callable[[np.ndarray], bool] | None,
        on_token: Callable[[int, int, int], None] | None,
    ) -> None:
        used = sorted({row.prompt for row in rows})
        filled = {prompt: self._prefill(prompts[prompt]) for prompt in used}
        logits = {prompt: self._logits(last) for prompt, (_, last) in filled.items()}
        place = Place([row.prompt for row in rows], [len(prompts[row.prompt]) for row in rows])
        caches = [
            self._decode({prompt: filled[prompt][0][i] for prompt in used}, place)
            for i in range(self._layers)
        ]
        del filled
        active, now = list(rows), np.concatenate([logits[row.prompt] for row in rows])
        while True:
            advance(active, now, sampling, stop_text, on_token)
            kept = [i for i, row in enumerate(active) if row.stop is None]
            if not kept:
                return
            if len(kept) < len(active):
                index = mx.array(kept)
                place.keep(kept)
                for cache in caches:
                    cache.keep(index)
                active = [active[i] for i in kept]
            tokens = mx.array([[row.ids[-1]] for row in active], mx.int32)
            now = self._logits(self._hidden(tokens, caches))
            place.count += 1

    def _decode(self, filled: Mapping[int, Prefix], place: Place) -> Decode:
        """The cache of one layer behind the prompts' keys and values."""
        if self._masking.attends:
            return SharedDecode(place, filled, len(place.prompts), self._masking)
        made = Decode(place, _spread(filled, place, "keys"), _spread(filled, place, "values"), self._masking)
        mx.eval(made.keys, made.values)
        return made


def _spread(filled: Mapping[int, Prefix], place: Place, name: str) -> mx.array:
    """The prompts' keys or values of one layer, one copy a row, padded to the widest prompt and to room."""
    padded = {}
    for prompt, cache in filled.items():
        value = getattr(cache, name)
        padded[prompt] = mx.pad(value, [(0, 0), (0, 0), (0, place.width + GROWTH - value.shape[2]), (0, 0)])
    return mx.concatenate([padded[prompt] for prompt in place.prompts])
