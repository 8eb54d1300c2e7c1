"""A second Python process that runs what may be slow, may hang or is not ours, and that can be killed.

A subprocess and not multiprocessing: it never imports the caller's main module, so it needs no guard there, works
the same on every platform and next to threads, and a kill leaves no shared lock behind. Messages are pickles with
a length before them; what the work prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import IO, Any

from instep.errors import TrainingError

HEADER = struct.Struct("<Q")
START_SECONDS = 120.0
PACKAGE = Path(__file__).resolve().parents[1]
# The search path is appended to, and -P keeps the current folder out: a file of the user's called inspect.py
# must not stand before Python's own. This package is loaded by its place, so that both processes run the same.
SERVE = """
import importlib.util, sys
sys.path.extend(sys.argv[2:])
spec = importlib.util.spec_from_file_location("instep", sys.argv[1])
package = sys.modules["instep"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from instep.rewards.worker import serve
serve()
"""


class WorkerTimeout(Exception):
    """The work did not end in time; its process was killed."""


class WorkerDied(Exception):
    """The process ended in the middle of the work (a crash, or out of memory)."""


class WorkError(Exception):
    """The work raised: type and text of the exception, and where in the user's code it stood."""

    def __init__(self, kind: str, text: str, place: str) -> None:
        super().__init__(kind, text, place)
        self.kind, self.text, self.place = kind, text, place

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.place})" if self.place else "")


class Worker:
    """One process, started when first needed and again after it was killed. One piece of work at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._replies: queue.Queue[tuple[str, Any] | None] = queue.Queue()
        self._since = 0.0

    def submit(self, function: str, *arguments: Any) -> None:
        """Begin `module:function` of this package with picklable arguments.

        Raises TrainingError where the process cannot be started.
        """
        if not self.running:
            self._start()
        self._since = time.monotonic()
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # seen as WorkerDied when the result is asked for
            _send(self._process.stdin, (function, arguments))

    def result(self, timeout_seconds: float) -> Any:
        """What the work submitted last returned.

        Raises WorkError where it raised, WorkerTimeout where it took longer since `submit` (the process is
        killed), WorkerDied where its process ended.
        """
        remaining = self._since + timeout_seconds - time.monotonic()
        try:
            reply = self._replies.get(timeout=max(remaining, 0.001))
        except queue.Empty:
            self.close()
            raise WorkerTimeout(f"took longer than {timeout_seconds:g} seconds and was killed") from None
        if reply is None:
            code = self._process.wait() if self._process is not None else None
            self.close()
            raise WorkerDied(f"its process ended with code {code}")
        status, value = reply
        if status == "raised":
            raise WorkError(*value)
        return value

    def call(self, function: str, *arguments: Any, timeout_seconds: float) -> Any:
        self.submit(function, *arguments)
        return self.result(timeout_seconds)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """Kill the process, with whatever it started."""
        if self._process is not None:
            _kill(self._process)
            self._process = None

    def _start(self) -> None:
        self.close()
        paths = [path or str(Path.cwd()) for path in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE, str(PACKAGE / "__init__.py"), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=os.name == "posix",
        )
        self._replies = queue.Queue()
        assert self._process.stdout is not None
        reader = threading.Thread(target=_read_all, args=(self._process.stdout, self._replies), daemon=True)
        reader.start()
        weakref.finalize(self, _kill, self._process)
        try:
            ready = self._replies.get(timeout=START_SECONDS)
        except queue.Empty:
            ready = None
        if ready is None:
            self.close()
            raise TrainingError(
                "the process that rewards run in could not be started; its error stands above"
            )


def _read_all(stream: IO[bytes], replies: queue.Queue[tuple[str, Any] | None]) -> None:
    while True:
        try:
            reply = _receive(stream)
        except (OSError, ValueError):
            reply = None
        replies.put(reply)
        if reply is None:
            return


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    data = stream.read(length)
    return pickle.loads(data) if len(data) == length else None


def serve() -> None:
    """The process' own loop: until its input ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a print inside the work must not end up among the replies
    _send(replies, ("ready", None))
    while (message := _receive(sys.stdin.buffer)) is not None:
        function, arguments = message
        try:
            module, _, name = function.partition(":")
            reply = ("returned", getattr(importlib.import_module(module), name)(*arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (sent on, and raised in the other process)
            reply = ("raised", (type(error).__name__, str(error), _place(error)))
        _send(replies, reply)


def _place(error: BaseException) -> str:
    """File and line where the user's code raised: the innermost frame outside this package."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}"
    others = (str(PACKAGE), "<frozen", sys.prefix, sys.base_prefix)
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)
    ]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
