"""safetensors files tensor by tensor, bfloat16 included, with numpy alone: no second copy of a model in memory.

The format: eight bytes with the length of a JSON header (little endian), the header (name → dtype, shape, offsets
into what follows; `__metadata__`), the bytes of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from instep.errors import InputError
from instep.files import writing

FLOATS = {"BF16": 2, "F16": 2, "F32": 4}
"""Stored types that can be fused, and their bytes."""
TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Names of precisions → how safetensors calls them."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """An opened safetensors file; tensors are mapped, not read. Raises InputError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= path.stat().st_size - 8:
                    raise ValueError("its header is cut")
                header = json.loads(file.read(length))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.entries = {
                name: Entry(name, value["dtype"], tuple(value["shape"]), *value["data_offsets"])
                for name, value in header.items()
            }
            self._bytes = (
                np.memmap(path, np.uint8, "r", offset=8 + length) if header else np.zeros(0, np.uint8)
            )
            if max((entry.end for entry in self.entries.values()), default=0) > len(self._bytes):
                raise ValueError("it ends before its last tensor")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{path} is no readable safetensors file: {error}") from error

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [size]."""
        entry = self.entries[name]
        return self._bytes[entry.start : entry.end]

    def float32(self, name: str) -> np.ndarray:
        """A BF16, F16 or F32 tensor as float32, exact."""
        entry = self.entries[name]
        return as_float32(self.raw(name), entry.dtype).reshape(entry.shape)


def as_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes of a stored type → float32 [size]."""
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(raw.tobytes(), "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw.tobytes(), {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 → bytes of a stored type, rounded to the nearest, ties to even; uint8 [size]."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    if dtype == "BF16":
        bits = flat.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isfinite(flat), rounded, bits >> 16).astype("<u2").view(np.uint8)
    with np.errstate(over="ignore"):  # an overflow is infinite, which the caller looks for
        return flat.astype({"F16": "<f2", "F32": "<f4"}[dtype]).view(np.uint8)


def write_tensors(
    path: Path,
    entries: Sequence[Entry],
    content: Callable[[Entry], np.ndarray],
    metadata: dict[str, str],
) -> int:
    """Write a file of these tensors (their `start` and `end` are set anew), each asked for when its turn comes.

    Returns the bytes of all tensors. Raises InputError where the disk refuses.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for entry in entries:
        size = (
            FLOATS[entry.dtype] * int(np.prod(entry.shape))
            if entry.dtype in FLOATS
            else entry.end - entry.start
        )
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            begin, end = header[entry.name]["data_offsets"]
            data = content(entry)
            assert data.nbytes == end - begin, entry.name
            np.ascontiguousarray(data).tofile(file)
    return at
