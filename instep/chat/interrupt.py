"""Ctrl-C while a model answers: it ends the answer, not the program."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """Within the block, the first Ctrl-C sets `asked`; a second one raises KeyboardInterrupt at once.

    Outside the main thread, where no signal arrives, it only offers the flag.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
