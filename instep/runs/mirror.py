"""A run's side of its tracker: starts the process that follows `metrics.jsonl`, and hears what becomes of it."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from instep.config import TrackingSettings
from instep.errors import InputError
from instep.runs import trackers

OPEN_SECONDS, OPEN_SECONDS_SPACE = 60.0, 600.0
"""A tracker that has not opened in so long is refused; making a Space takes minutes."""
CLOSE_SECONDS = 90.0
"""At the end the rest is handed over; a tracker that takes longer is ended."""


class Mirror:
    """From `start`, which imports the tracker's library beside the run's own preparations, to `close`.

    A tracker that cannot be opened is an InputError; one that fails later is told once, by `note`, and training
    goes on: `instep runs sync` rebuilds the mirror.
    """

    def __init__(self, settings: TrackingSettings, run_folder: Path, note: Callable[[str], None]) -> None:
        """Raises InputError where the tracker that is asked for is not installed."""
        self._settings, self._folder, self._note = settings, run_folder.absolute(), note
        self.tracker = trackers.choose(settings.tracker)
        self.failed = False
        self.records: int | None = None
        """How many the tracker was handed, once it is closed."""
        self._process: subprocess.Popen[str] | None = None
        self._heard: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._open = False
        self._remote = trackers.trackio_is_remote(settings.space_id)
        if settings.space_id and self.tracker != "trackio":
            raise InputError(
                f"tracking.space_id is for trackio, but the tracker is {self.tracker or 'none'}: set "
                "tracking.tracker to trackio (pip install 'instep[trackio]'), or remove space_id"
            )

    @property
    def home(self) -> Path:
        return trackers.trackio_home(self._settings, self._folder)

    def start(self) -> None:
        """Start the process; it imports the library while the run prepares."""
        if self.tracker is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "instep.runs.follow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )
        threading.Thread(target=self._hear, args=(self._process,), daemon=True).start()
        self._send(
            {
                "tracker": self.tracker,
                "home": str(self.home),
                "project": self._settings.project,
                "space_id": self._settings.space_id,
            }
        )

    def _hear(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            self._heard.put(json.loads(line))
        self._heard.put(None)

    def _send(self, value: Mapping[str, Any]) -> None:
        assert self._process and self._process.stdin
        try:
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: what it said, or that it said nothing, is heard by `begin`

    def begin(self, run_id: str, config: Mapping[str, Any]) -> None:
        """Open the tracker for a run whose metrics file exists. Raises InputError where it refuses."""
        if self._process is None:
            return
        self._send({"run_id": run_id, "run_folder": str(self._folder), "config": dict(config)})
        seconds = OPEN_SECONDS_SPACE if self._remote else OPEN_SECONDS
        try:
            heard = self._heard.get(timeout=seconds)
        except queue.Empty:
            heard = {"state": "refused", "message": f"it has not opened in {seconds:.0f} s"}
        if heard is None:
            heard = {
                "state": "refused",
                "message": f"its process ended with exit code {self._process.wait()}",
            }
        if heard["state"] != "open":
            self._kill()
            raise InputError(
                f"tracker {self.tracker} cannot be opened: {heard['message']}; mend that, or choose another with "
                "--set tracking.tracker=none (or tensorboard, wandb, trackio)"
            )
        self._open = True
        where = (
            f", in {self.home} (instep runs open)" if self.tracker == "trackio" and not self._remote else ""
        )
        self._note(f"tracker: {self.tracker}, run {run_id}{where}")

    def check(self) -> None:
        """Hear what the process has said meanwhile; a failure is told once."""
        while self._process is not None:
            try:
                heard = self._heard.get_nowait()
            except queue.Empty:
                return
            if heard is None:
                self._fail(f"its process ended with exit code {self._process.wait()}")
                self._process = None
            elif heard["state"] == "failed":
                self._fail(heard["message"])

    def _fail(self, why: str) -> None:
        if not self.failed:
            self.failed = True
            self._note(
                f"tracker {self.tracker} failed: {why}; training and metrics.jsonl are not touched by that: "
                f"instep runs sync {self._folder} rebuilds it"
            )

    def close(self) -> None:
        """End the process; where the tracker was opened, when the rest has been handed over."""
        if self._process is None:
            return
        if not self._open:
            self._kill()
            return
        self.check()
        process = self._process
        if process is None:
            return
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself: heard below
            process.stdin.close()
        closed = False
        try:
            while (heard := self._heard.get(timeout=CLOSE_SECONDS)) is not None:
                if heard["state"] == "closed":
                    closed, self.records = True, heard["records"]
                if heard["state"] == "failed":
                    self._fail(heard["message"])
            if not closed:
                self._fail(f"its process ended with exit code {process.wait()}")
        except queue.Empty:
            self._fail(f"it did not take the last records in {CLOSE_SECONDS:.0f} s")
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream:
                    with contextlib.suppress(
                        BrokenPipeError
                    ):  # what was not sent is for a process that ended
                        stream.close()

    def __enter__(self) -> Mirror:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
