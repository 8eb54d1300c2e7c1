"""Trackers mirror `metrics.jsonl`, which stays the truth: one small interface, one module a tracker.

Trackers are imported and opened in a process of their own (`instep.runs.follow`), so that neither their start-up
nor their failures nor their threads touch the training.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from instep.config import TrackingSettings
from instep.errors import InputError
from instep.runs.folder import STAGES

# name → (module, the package it needs)
TRACKERS = {
    "trackio": ("instep.runs.trackers.trackio_tracker", "trackio"),
    "tensorboard": ("instep.runs.trackers.tensorboard_tracker", "tensorboard"),
    "wandb": ("instep.runs.trackers.wandb_tracker", "wandb"),
}
ENVIRONMENT = "INSTEP_TRACKER"


class TrackerError(Exception):
    """A tracker that cannot be opened or written to."""


@dataclass(frozen=True)
class Target:
    """What a tracker is opened for. `config` is flat, by dotted names, and holds no secrets."""

    tracker: str
    project: str
    run_id: str
    run_folder: Path
    home: Path
    """Trackio's directory."""
    space_id: str | None
    config: dict[str, Any]


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Returns when everything has been handed over. Raises TrackerError where something was lost."""
        ...


class Library(Protocol):
    """A module of this package."""

    def load(self, home: Path, space_id: str | None) -> object:
        """Import the library. Raises what it raises."""
        ...

    def open_tracker(self, target: Target, problem: Callable[[str], None]) -> Tracker:
        """Begin the run in the tracker: every record is logged again, so what it holds of the run is forgotten,
        or is skipped where that cannot be.

        `problem` is told what goes wrong without an exception. Raises TrackerError, or what the library raises.
        """
        ...


def choose(asked: str) -> str | None:
    """The tracker to use, None for no mirror. `auto` is INSTEP_TRACKER, else Trackio where it is installed.

    Raises InputError where the one asked for is unknown or not installed.
    """
    where = "tracking.tracker"
    if asked == "auto" and os.environ.get(ENVIRONMENT):
        asked, where = os.environ[ENVIRONMENT], ENVIRONMENT
    if asked == "auto":
        return "trackio" if importlib.util.find_spec("trackio") else None
    if asked == "none":
        return None
    if asked not in TRACKERS:
        raise InputError(f"{where} = {asked!r}: expected auto, none or one of {', '.join(TRACKERS)}")
    package = TRACKERS[asked][1]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{where} = {asked!r} needs the package {package}: pip install 'instep[{asked}]'")
    return asked


def library(tracker: str) -> Library:
    return cast(Library, importlib.import_module(TRACKERS[tracker][0]))


def trackio_is_remote(space_id: str | None) -> bool:
    """Whether Trackio logs to a Space or a server rather than to its local database."""
    return bool(space_id or os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL"))


def trackio_home(settings: TrackingSettings, run_folder: Path) -> Path:
    """Trackio's directory: the setting, else TRACKIO_DIR, else `.trackio` beside the run.

    Runs that lie side by side can so be compared; the stages of one run count as that run.
    """
    given = settings.folder or os.environ.get("TRACKIO_DIR")
    if given:
        return Path(given).expanduser().absolute()
    parent = run_folder.absolute().parent
    return (parent.parent if (parent / STAGES).is_file() else parent) / ".trackio"
