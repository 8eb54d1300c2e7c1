"""Samples → rows → batches: order, packing, fixed shapes.

Everything here is a pure function of the samples and the seed, so that a run can go on at any step.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from instep.engines.base import ShapeRules
from instep.records import Batch, Sample

Row = tuple[int, ...]
"""Indices of the samples that share one row."""


def pack(lengths: Sequence[int], row_length: int) -> list[Row]:
    """Best-fit decreasing bin packing (Johnson 1974): each sample whole in one row of at most `row_length`.

    Raises ValueError for a sample longer than a row: cutting is the windows' work, never done here.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for index in order:
        length = lengths[index]
        if length > row_length:
            raise ValueError(f"sample {index} has {length} tokens, a row {row_length}")
        place = bisect.bisect_left(free, (length, -1))
        if place == len(free):
            rows.append([])
            room, row = row_length, len(rows) - 1
        else:
            room, row = free.pop(place)
        rows[row].append(index)
        bisect.insort(free, (room - length, row))
    return [tuple(sorted(row)) for row in rows]


@dataclass(frozen=True)
class Order:
    """The rows of every optimizer step, without end: epoch after epoch, each shuffled by (seed, epoch)."""

    rows: tuple[Row, ...]
    rows_per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.rows_per_step)

    def step(self, step: int) -> list[Row]:
        """Rows of optimizer step `step` (0, 1, …); the last step of an epoch may hold fewer."""
        epoch, place = divmod(step, self.steps_per_epoch)
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        chosen = shuffled[place * self.rows_per_step : (place + 1) * self.rows_per_step]
        return [self.rows[index] for index in chosen]


def make_order(
    samples: Sequence[Sample], row_length: int, packing: bool, rows_per_step: int, seed: int
) -> Order:
    """Rows of all samples, packed or one sample a row."""
    lengths = [len(sample) for sample in samples]
    rows = pack(lengths, row_length) if packing else [(index,) for index in range(len(samples))]
    return Order(tuple(rows), rows_per_step, seed)


def _round_up(value: int, multiple: int) -> int:
    return max(multiple, -(-value // multiple) * multiple)


def collate(
    rows: Sequence[Sequence[Sample]],
    rules: ShapeRules,
    row_count: int | None = None,
    prefix: np.ndarray | None = None,
) -> Batch:
    """Lay rows of samples out as one Batch, L and K rounded up to the engine's multiples.

    `row_count` adds empty rows up to that number, for engines that compile by shape. Padding has token 0,
    segment 0 and weight 0. `prefix` int32 [P] stands before every row (of one sample each), whose positions
    go on from it.
    """
    first = 0 if prefix is None else len(prefix)
    row_count = max(len(rows), row_count or 0)
    length = _round_up(max(sum(map(len, row)) for row in rows), rules.length_multiple)
    shape = (row_count, length)
    tokens, segment, position = (np.zeros(shape, np.int32) for _ in range(3))
    sites: list[np.ndarray] = []
    chosen: list[tuple[Sample, np.ndarray]] = []
    for r, row in enumerate(rows):
        start = 0
        for number, sample in enumerate(row, start=1):
            stop = start + len(sample)
            tokens[r, start:stop] = sample.tokens
            segment[r, start:stop] = number
            position[r, start:stop] = first + np.arange(len(sample))
            targets = np.flatnonzero(sample.weight[1:] > 0) + 1
            sites.append(r * length + start + targets - 1)
            chosen.append((sample, targets))
            start = stop
    count = _round_up(sum(map(len, sites)), rules.site_multiple)

    def field(values: list[np.ndarray], dtype: type) -> np.ndarray:
        out = np.zeros(count, dtype)
        flat = np.concatenate(values) if values else np.zeros(0)
        out[: len(flat)] = flat
        return out

    def optional(name: str) -> np.ndarray | None:
        values = [getattr(sample, name) for sample, _ in chosen]
        if any(value is None for value in values):
            return None
        return field([value[t] for value, (_, t) in zip(values, chosen, strict=True)], np.float32)

    return Batch(
        tokens=tokens,
        segment=segment,
        position=position,
        site=field(sites, np.int32),
        label=field([s.tokens[t] for s, t in chosen], np.int32),
        weight=field([s.weight[t] for s, t in chosen], np.float32),
        behaviour_logprob=optional("behaviour_logprob"),
        reference_logprob=optional("reference_logprob"),
        advantage=optional("advantage"),
        sequence=field([np.full(len(t), i) for i, (_, t) in enumerate(chosen)], np.int32),
        sequences=len(chosen),
        prefix=None if prefix is None or not len(prefix) else prefix.astype(np.int32),
    )


def fingerprint(samples: Sequence[Sample]) -> str:
    """sha256 over tokens and weights: two data sets with the same value train the same."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(sample.tokens, "<i4").tobytes())
        digest.update(np.ascontiguousarray(sample.weight, "<f4").tobytes())
    return digest.hexdigest()
