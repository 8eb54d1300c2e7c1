"""Rows of a JSONL or Parquet file, each with the place it stands at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.errors import InputError


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, row). Raises InputError where the file is missing, empty or not what it says."""
    if not path.is_file():
        raise InputError(f"{path}: no such file of tasks")
    rows = _parquet(path) if path.suffix == ".parquet" else _jsonl(path)
    found = False
    for row in rows:
        found = True
        yield row
    if not found:
        raise InputError(f"{path}: the file has no task in it")


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    # Lines end at \n only: a U+2028 inside a string is no line end.
    with path.open("r", encoding="utf-8-sig", newline="\n") as file:
        number = 0
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise InputError(
                        f"{path}:{number}: expected a JSON object a line, found {line.strip()[:50]}"
                    )
                yield f"{path.name}:{number}", row
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON ({error.msg}); expected an object a line") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not UTF-8 after line {number}; save the file as UTF-8") from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            f"{path}: reading Parquet needs pyarrow (pip install pyarrow), or set task.path to JSONL files"
        ) from error
    for number, row in enumerate(pyarrow.parquet.read_table(path).to_pylist(), start=1):
        yield f"{path.name}:{number}", row
