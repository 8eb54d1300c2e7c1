"""The process beside a run that mirrors `metrics.jsonl` to a tracker: `python -m instep.runs.follow`.

It reads the file as it grows, so that training never waits for a tracker. On its standard input it is handed one
JSON line on which tracker's library it imports, and one with the run, for which it opens the tracker; the end of
the input, be it that the run ended or was killed, tells it to hand over the rest and to end. On its standard
output it says, one JSON object a line: `open`; `failed` with a `message`, once (it goes on where it can); `closed`
with the number of records; or `refused` with a `message`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import IO, Any, Protocol

from instep.runs.folder import METRICS
from instep.runs.trackers import Target, Tracker, TrackerError, library
from instep.runs.vocabulary import figures
from instep.sessions.redaction import Redactor

POLL_SECONDS = 0.5
NICENESS = 10
"""Training comes first."""


class Say(Protocol):
    def __call__(self, state: str, **more: Any) -> None: ...


class Follower:
    """Hands the records of a growing metrics file to a tracker."""

    def __init__(self, tracker: Tracker, say: Say, problems: list[str]) -> None:
        self._tracker, self._say, self._problems = tracker, say, problems
        self._records, self._told, self._rest = 0, False, b""

    def run(self, metrics: Path, ended: threading.Event) -> None:
        """Follow until `ended`, then hand over what is left and close the tracker."""
        with metrics.open("rb") as file:
            run, last = os.getppid(), False
            while not last:
                # Asked before reading: what was written before the end is read.
                last = ended.wait(POLL_SECONDS) or os.getppid() != run
                self._take(file.read())
                self._tell()
        self._try(self._tracker.close)
        self._tell()
        self._say("closed", records=self._records)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            record = json.loads(line)
            values = figures(record)
            if values:
                self._try(self._tracker.log, int(record["step"]), values)
                self._records += 1

    def _try(self, action: Any, *arguments: Any) -> None:
        try:
            action(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a library raises is told; the mirror can be rebuilt
            self._problems.append(f"{type(error).__name__}: {error}")

    def _tell(self) -> None:
        if self._problems and not self._told:
            self._told = True
            self._say("failed", message=self._problems[0])


def without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """Settings as a tracker may see them: secrets, e-mail addresses and home directories replaced."""
    redactor = Redactor()
    redactor.learn(config)
    return redactor.value(config)


def _end_of(stream: IO[str]) -> threading.Event:
    """Set when the stream ends."""
    ended = threading.Event()

    def wait() -> None:
        stream.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def main() -> int:
    # Libraries print; what they print must not be taken for what this process says.
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Ctrl-C is for the run, which tells this process to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)

    def say(state: str, **more: Any) -> None:
        if "message" in more:
            more["message"] = Redactor().text(" ".join(str(more["message"]).split()))
        try:
            said.write(json.dumps({"state": state, **more}) + "\n")
            said.flush()
        except (
            BrokenPipeError
        ):  # the run was killed: nobody listens, and what was written is still handed over
            pass

    problems: list[str] = []
    try:
        first = sys.stdin.readline()
        if not first:
            return 0
        task = json.loads(first)
        home = Path(task["home"])
        module = library(task["tracker"])
        module.load(home, task["space_id"])
        second = sys.stdin.readline()
        if not second:
            return 0
        task |= json.loads(second)
        folder, config = Path(task.pop("run_folder")), without_secrets(task.pop("config"))
        target = Target(**task | {"home": home, "run_folder": folder, "config": config})
        tracker = module.open_tracker(target, problems.append)
        if problems:
            raise TrackerError(problems[0])
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a library raises is what the run is told
        say("refused", message=f"{type(error).__name__}: {error}")
        return 1
    say("open")
    Follower(tracker, say, problems).run(folder / METRICS, _end_of(sys.stdin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
