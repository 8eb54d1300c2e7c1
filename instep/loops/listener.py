"""What a loop tells whoever watches it. The command line shows it; tests collect it."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Protocol


class Listener(Protocol):
    def note(self, text: str) -> None:
        """One line for a person: a choice that was made, with its reason; a checkpoint; a warning."""
        ...

    def metrics(self, record: dict[str, Any], remaining_seconds: float | None) -> None:
        """A record as it goes to metrics.jsonl, and an estimate of the seconds that are left."""
        ...

    def phase(self, name: str, done: int, total: int) -> None:
        """Progress inside long work such as evaluation: `done` of `total`."""
        ...


class Stopped(Exception):
    """A stop was asked for in the midst of work that can be dropped."""


class StopFlag:
    """Ctrl-C (and SIGTERM) ask the loop to stop at the next safe place; a second Ctrl-C stops at once.

    Used as a context manager in the main thread; elsewhere it only offers the flag.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def check(self, *_: object) -> None:
        """Raises Stopped where a stop was asked for. It can be called at each token of `generate`."""
        if self.requested:
            raise Stopped

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
