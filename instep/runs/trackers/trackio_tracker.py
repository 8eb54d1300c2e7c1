"""Trackio: a local SQLite database, a Hugging Face Space, or a server of one's own (TRACKIO_SERVER_URL)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.runs.trackers import Target, TrackerError, trackio_is_remote


def load(home: Path, space_id: str | None) -> Any:
    """Import Trackio for a directory, which it reads once, at its import. Returns the module."""
    os.environ["TRACKIO_DIR"] = str(home)
    if not trackio_is_remote(space_id):
        # A local run has nothing to ask the Hub, not even who is logged in.
        os.environ["HF_HUB_OFFLINE"] = "1"
    import trackio
    from trackio.utils import TRACKIO_DIR

    if home != TRACKIO_DIR:
        raise TrackerError(f"Trackio was imported for {TRACKIO_DIR} before, and cannot change to {home}")
    return trackio


class TrackioRun:
    def __init__(self, target: Target, problem: Callable[[str], None]) -> None:
        self._remote = trackio_is_remote(target.space_id)
        self._trackio = load(target.home, target.space_id)
        self._target, self._logged = target, 0
        _tell_problems(problem)
        if not self._remote:
            self._try_database()
            self._forget()
        self._run = self._trackio.init(
            project=target.project,
            name=target.run_id,
            space_id=target.space_id,
            config=target.config,
            resume="allow" if self._remote else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        # What lies on a server is not deleted from here: what it has already is not sent again.
        last = getattr(self._run, "_initial_last_step", None) if self._remote else None
        self._skip_through = -1 if last is None else int(last)

    def _try_database(self) -> None:
        """Make and write to the database now: Trackio itself would find only later, in a thread, that it cannot."""
        from trackio.sqlite_storage import SQLiteStorage

        self._target.home.mkdir(parents=True, exist_ok=True)
        SQLiteStorage.init_db(self._target.project)
        SQLiteStorage.set_project_metadata(self._target.project, "written_by", "instep")

    def _records(self) -> list[Any]:
        """Runs of this name in the local database."""
        try:
            runs = self._trackio.Api().runs(self._target.project)
        except ValueError:  # there is no such project yet
            return []
        return [run for run in runs if run.name == self._target.run_id]

    def _forget(self) -> None:
        for run in self._records():
            if not run.delete():
                raise TrackerError(f"Trackio could not replace its records of run {self._target.run_id}")

    def log(self, step: int, values: dict[str, float]) -> None:
        if step > self._skip_through:
            self._run.log(values, step=step)
            self._logged += 1

    def close(self) -> None:
        self._run.finish()
        if self._remote or not self._logged:
            return
        from trackio.sqlite_storage import SQLiteStorage

        project = self._target.project
        stored = sum(SQLiteStorage.get_log_count(project, run.name, run.id) for run in self._records())
        if stored != self._logged:
            raise TrackerError(f"Trackio holds {stored} of {self._logged} records")


def _tell_problems(problem: Callable[[str], None]) -> None:
    """Trackio turns its own exceptions into warnings, also in its threads."""

    def show(message: Any, category: Any, filename: str, *_: Any, **__: Any) -> None:
        if "trackio" in Path(filename).parts and not issubclass(
            category, (FutureWarning, DeprecationWarning)
        ):
            problem(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = show


def open_tracker(target: Target, problem: Callable[[str], None]) -> TrackioRun:
    return TrackioRun(target, problem)
