"""`metrics.jsonl`: one JSON object a line, the truth about a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.files import write_atomically, writing


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a metrics file; a torn last line (the process was killed while writing) is left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


class MetricsLog:
    """Appends records. Non-finite numbers are stored as null: nothing non-finite is ever written."""

    def __init__(self, path: Path, through_step: int = 0) -> None:
        """Open for appending, dropping records after `through_step`: those steps will be done again."""
        self._path = path
        if path.is_file():
            kept = [record for record in read_metrics(path) if record.get("step", 0) <= through_step]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
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
