"""Tensors of a model folder, mapped from its *.safetensors without a copy: one file or a sharded index."""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from instep.errors import InputError

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
LONGEST_HEADER_BYTES = 100_000_000
"""As the format's own reader has it."""


def read_tensors(folder: str) -> dict[str, np.ndarray]:
    """Name → read-only array over the mapped file, of every floating-point tensor of the folder.

    The format: 8 bytes of little-endian header length, a JSON header (name → dtype, shape, data_offsets), data.
    Raises InputError where a file is missing, torn, or not of that format.
    """
    tensors: dict[str, np.ndarray] = {}
    for path in _files(Path(folder)):
        tensors |= _read(path)
    return tensors


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index} names no weight_map ({error!r}): fetch the model again") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise InputError(
                f"{folder}: {len(missing)} of {len(names)} files that its index names are not there, such as "
                f"{missing[0]}: fetch the model again"
            )
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise InputError(
            f"{folder} has no *.safetensors: convert the weights to safetensors, or fetch them again"
        )
    return found


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            if length > min(size - 8, LONGEST_HEADER_BYTES):
                raise InputError(f"{path} is no safetensors file or is cut off: fetch the model again")
            header = json.loads(file.read(length))
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                continue
            count = int(np.prod(entry["shape"], dtype=np.int64))
            start, stop = entry["data_offsets"]
            if stop - start != count * np.dtype(dtype).itemsize:
                raise InputError(f"{path}: {name} has the wrong number of bytes: fetch the model again")
            tensors[name] = np.frombuffer(mapped, dtype, count, 8 + length + start).reshape(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise InputError(f"{path} cannot be read as safetensors ({error}): fetch the model again") from error
    return tensors
