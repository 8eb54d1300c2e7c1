"""Keep the machine awake while it trains: a helper process that ends when this one does, however that is."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import IO

WAIT_SECONDS = 2.0
SYSTEMD = Path("/run/systemd/system")
"""Is there where systemd runs (sd_booted(3)); in a container, nobody could be asked to stay awake."""


def awake_command(system: str, pid: int) -> list[str] | None:
    """The command that keeps this machine awake; None where there is none.

    macOS: caffeinate ends by itself when process `pid` does (-w). Linux: systemd-inhibit holds as long as its
    command runs, and that reads a pipe which the kernel closes when this process ends.
    """
    if system == "Darwin" and (caffeinate := shutil.which("caffeinate")):
        return [caffeinate, "-dimsu", "-w", str(pid)]
    inhibit, cat = shutil.which("systemd-inhibit"), shutil.which("cat")
    if system == "Linux" and SYSTEMD.is_dir() and inhibit and cat:
        return [inhibit, "--what=idle:sleep", "--who=instep", "--why=training", "--mode=block", cat]
    return None


class KeepAwake:
    """Context manager. `failed` tells, once, why the machine may fall asleep all the same."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system or platform.system()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> KeepAwake:
        command = awake_command(self._system, os.getpid())
        if command is not None:
            self._errors = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the run, which checkpoints awake
            )
        return self

    def failed(self) -> str | None:
        """Why the helper has ended before the run did; None while it holds, or where it was told already."""
        if self._process is None or self._process.poll() is None:
            return None
        assert self._errors
        self._errors.seek(0)
        said = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        reason = said[-1] if said else f"exit code {self._process.returncode}"
        self._release()
        return reason

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin:
                process.stdin.close()
            if self._system == "Darwin":
                process.terminate()
            try:
                process.wait(WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._errors:
            self._errors.close()
            self._errors = None

    def __exit__(self, *_: object) -> None:
        self._release()
