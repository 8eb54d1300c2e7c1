"""The run folder: who may write in it, and where everything in it lies."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from instep.errors import InputError
from instep.files import settle_folder, write_atomically, writing

CONFIG, METRICS, SUMMARY, LOCK = "config.toml", "metrics.jsonl", "summary.json", ".lock"
IDENTITY = ".id"
STAGES = "stages.toml"
"""In a folder of several runs, in place of `config.toml`: the resolved settings of every stage."""


def default_folder(model: str) -> Path:
    """`runs/<local time>-<model>` under the working directory."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(model).name).strip("-").lower()
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"


def refuse_existing(path: Path) -> None:
    """Raises InputError where a new run cannot have this folder: a run is never overwritten."""
    with writing(path):  # such as a name that is too long
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if taken:
        raise InputError(
            f"run folder {path} already exists and is not empty: go on with it (--resume), "
            "or choose another name (--run)"
        )


def in_use(path: Path) -> bool:
    """Whether a process is training in this run folder now."""
    try:
        with (path / LOCK).open("r", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, or none that can be read: nobody trains here
        return False
    return False


@dataclass
class RunFolder:
    """An opened run folder, locked against a second process until `close`."""

    path: Path
    new: bool = False
    """Made by this process."""
    _lock: IO[str] | None = field(default=None, repr=False)

    @classmethod
    def create(cls, path: Path, config: str) -> RunFolder:
        """Make a new run folder with its `config.toml`. Raises InputError where the name is taken."""
        refuse_existing(path)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        run = cls(path, new=True)
        try:
            run._acquire()
            write_atomically(path / CONFIG, config)
        except BaseException:
            run.discard_if_new()
            raise
        return run

    @classmethod
    def reopen(cls, path: Path) -> RunFolder:
        """Open an existing run to go on with it. Raises InputError where there is none or it is in use."""
        if not (path / CONFIG).is_file():
            raise InputError(
                f"{path} is not a run folder: it holds no {CONFIG}; start a run without --resume"
            )
        run = cls(path)
        run._acquire()
        for name in ("last", "best"):
            settle_folder(run.checkpoint(name))
        settle_folder(run.adapter)
        return run

    def _acquire(self) -> None:
        # flock is released by the kernel when the process dies, so a killed run leaves no stale lock.
        with writing(self.path):
            lock = (self.path / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            lock.close()
            raise InputError(
                f"run folder {self.path} is in use by process {owner}: wait for it or stop it"
            ) from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock = lock

    def close(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def discard_if_new(self) -> None:
        """Take back a folder that this process has made and that no step was trained in."""
        if self.new and not (self.path / "checkpoints").exists():
            self.close()
            shutil.rmtree(self.path)

    @property
    def known_id(self) -> str | None:
        """The run's id, where it has one already."""
        file = self.path / IDENTITY
        return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else None

    @property
    def id(self) -> str:
        """What trackers know the run by: its first name and eight random digits; moving the folder keeps it."""
        known = self.known_id
        if known is None:
            known = f"{self.path.absolute().name}-{uuid.uuid4().hex[:8]}"
            write_atomically(self.path / IDENTITY, f"{known}\n")
        return known

    def checkpoint(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / SUMMARY, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def read_summary(self) -> dict[str, Any] | None:
        path = self.path / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
