"""A Batch as the arrays of a compiled function, whose shapes come from a few buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from instep.engines.jax.attention import Grid
from instep.engines.jax.mesh import DATA, Placement
from instep.records import Batch

FIELDS = ("weight", "behaviour_logprob", "reference_logprob", "advantage")
STEPS_PER_OCTAVE = 4


def bucket(count: int, multiple: int) -> int:
    """The smallest bucket of at least `count`: a multiple of `multiple`, and beyond four of them a multiple of a
    quarter of the power of two below. There are four buckets an octave, and at most a quarter is padding."""
    power = 1 << max(0, (count - 1).bit_length() - 1)
    step = max(multiple, power // STEPS_PER_OCTAVE)
    return max(multiple, -(-count // step) * step)


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """`grid` and the number of site places are static; `arrays` are the compiled function's arguments:

    tokens, position, segment int32 [R, L]; prefix int32 [P]; prefix_length int32 []; site int32 [K], index into
    P + R·L; label int32 [K]; count int32 [], how many sites there are; and the batch's own fields [K].
    """

    grid: Grid
    arrays: dict[str, Any]


def lay_out(batch: Batch, keep: np.ndarray, chunk: int, multiple: int, placement: Placement) -> Layout:
    """The batch with the sites `keep` (indices into its K), on the mesh.

    Rows end behind the last site of any of them, as nothing can see what follows; their number becomes a power
    of two, and a multiple of the mesh's `data`.
    """
    rows, length = batch.tokens.shape
    site = batch.site[keep].astype(np.int64)
    needed = int((site % length).max(initial=0)) + 1
    short = bucket(needed, multiple)
    count = -(-power_of_two(rows) // placement.data) * placement.data
    prefix_length = 0 if batch.prefix is None else len(batch.prefix)
    prefix = np.zeros(bucket(prefix_length, multiple) if prefix_length else 0, np.int32)
    if batch.prefix is not None:
        prefix[:prefix_length] = batch.prefix

    def cut(values: np.ndarray) -> np.ndarray:
        out = np.zeros((count, short), np.int32)
        width = min(short, length)
        out[:rows, :width] = values[:, :width]
        return out

    segment = cut(batch.segment)
    grid = Grid(count, short, len(prefix), bool(segment.max(initial=0) > 1))
    # The number of sites is no part of the shape: there are places for a site on every token.
    places = max(grid.rows * grid.length, bucket(len(keep), multiple))
    if places > chunk:
        places = -(-places // chunk) * chunk

    def field(values: np.ndarray, dtype: Any) -> Any:
        out = np.zeros(places, dtype)
        out[: len(keep)] = values
        return placement.put(out)

    arrays: dict[str, Any] = {
        "tokens": placement.put(cut(batch.tokens), (DATA, None)),
        "position": placement.put(cut(batch.position), (DATA, None)),
        "segment": placement.put(segment, (DATA, None)),
        "prefix": placement.put(prefix),
        "prefix_length": placement.put(np.int32(prefix_length)),
        "site": field(site // length * short + site % length + len(prefix), np.int32),
        "label": field(batch.label[keep], np.int32),
        "count": placement.put(np.int32(len(keep))),
        "fields": {
            name: field(getattr(batch, name)[keep], np.float32)
            for name in FIELDS
            if getattr(batch, name) is not None
        },
    }
    if batch.sequence is not None:
        arrays["fields"]["sequence"] = field(batch.sequence[keep], np.int32)
    return Layout(grid, arrays)
