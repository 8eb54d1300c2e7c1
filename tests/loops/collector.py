"""A listener that keeps what it is told, and can ask for a stop after a step."""

from __future__ import annotations

from typing import Any

from instep.loops.listener import StopFlag


class Collector:
    def __init__(self, stop: StopFlag | None = None, stop_after: int = 0) -> None:
        self.records: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._stop, self._after = stop, stop_after

    def note(self, text: str) -> None:
        self.notes.append(text)

    def phase(self, name: str, done: int, total: int) -> None:
        pass

    def metrics(self, record: dict[str, Any], remaining_seconds: float | None) -> None:
        self.records.append(record)
        if self._stop and record["kind"] == "train" and record["step"] == self._after:
            self._stop.requested = True
