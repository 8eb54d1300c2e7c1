"""A thread beside a run: watches memory and swap, and writes the heartbeat."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from instep.runs.heartbeat import Heartbeat, first_beat, next_beat, write_heartbeat
from instep.runs.machine import Reading, read_machine


class MemoryWatch:
    """Reads the machine every `seconds`. An alarm is raised when the swap in use has grown by `growth_bytes` since
    the run began, and again whenever it has grown by as much since the last alarm.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        growth_bytes: int,
        progress: Callable[[], tuple[int, str]],
        read: Callable[[], Reading] = read_machine,
    ) -> None:
        """`progress` tells the step and what is being done; it and `read` are called from the thread."""
        self._folder, self._seconds, self._growth = folder, seconds, growth_bytes
        self._progress, self._read = progress, read
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="instep-watch", daemon=True)
        self.latest = self._first = self._at_alarm = read()
        self._alarm = False
        self._beat: Heartbeat = first_beat(self.latest, *progress())
        self.problem: str | None = None
        """What last kept the watch from its work."""

    def start(self) -> None:
        """Raises OSError where the heartbeat cannot be written."""
        write_heartbeat(self._folder, self._beat)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(self._seconds):
            try:
                self.look()
            except OSError as error:
                self.problem = f"the watch over memory has trouble: {error}"

    def look(self) -> None:
        """One reading, its judgement, and a heartbeat."""
        self.latest = now = self._read()
        if now.swap_used_bytes - self._at_alarm.swap_used_bytes >= self._growth:
            self._at_alarm, self._alarm = now, True
        self._write()

    def _write(self, ended: str | None = None) -> None:
        step, doing = self._progress()
        self._beat = next_beat(self._beat, self.latest, step, doing, self.swap_grown_bytes)
        write_heartbeat(self._folder, replace(self._beat, ended=ended))

    @property
    def swap_grown_bytes(self) -> int:
        """Since the run began."""
        return max(0, self.latest.swap_used_bytes - self._first.swap_used_bytes)

    def take_alarm(self) -> bool:
        """Whether there was an alarm since this was last asked."""
        alarm, self._alarm = self._alarm, False
        return alarm

    @property
    def eased(self) -> bool:
        """Since the last alarm, half of the growth was given back, or as much memory has become available.

        What was swapped out may stay there for long after memory is free again, so either will do.
        """
        now, then = self.latest, self._at_alarm
        return (
            now.swap_used_bytes <= then.swap_used_bytes - self._growth // 2
            or now.available_bytes >= then.available_bytes + self._growth
        )

    def stop(self, ended: str) -> None:
        """End the thread and write how the run ended. Raises OSError where that cannot be written."""
        self._done.set()
        self._thread.join()
        self._write(ended)
