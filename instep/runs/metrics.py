"""`metrics.jsonl`: one JSON object a line, the truth about a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.files import write_atomically, writing


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a metrics file; a line that is none (torn where the process was killed, or damaged) is left out."""
    for _, record in _lines(path):
        if record is not None:
            yield record


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Each line that holds something, and its record, where it is one."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield line, record if isinstance(record, dict) else None


class MetricsLog:
    """Appends records. Non-finite numbers are stored as null: nothing non-finite is ever written."""

    def __init__(self, path: Path, through_step: int = 0) -> None:
        """Open for appending, dropping records after `through_step`: those steps will be done again.

        A damaged line stays as it is, but for a torn last one.
        """
        self._path = path
        if path.is_file():
            lines = list(_lines(path))
            if lines and lines[-1][1] is None:
                lines.pop()
            kept = [line for line, record in lines if record is None or record.get("step", 0) <= through_step]
            write_atomically(path, "".join(f"{line}\n" for line in kept))
        with writing(path):
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        safe = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with writing(self._path):
            self._file.write(json.dumps(safe, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
