"""A run written anew to its tracker, from `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.config import TrackingSettings
from instep.errors import InputError, TrainingError
from instep.runs.folder import RunFolder, in_use
from instep.runs.mirror import Mirror
from instep.runs.overview import load_run_settings
from instep.settings_file import flatten, validate


def sync_run(path: Path, tracker: str | None, note: Callable[[str], None]) -> dict[str, Any]:
    """Rebuild the run in the tracker that is named, or in its own.

    Raises InputError where there is nothing to rebuild, the run is being trained, or the tracker cannot be opened;
    TrainingError where the tracker did not take everything.
    """
    settings = load_run_settings(path)
    run = RunFolder(path)
    if not run.metrics.is_file():
        raise InputError(f"{path} has no {run.metrics.name} yet: there is nothing to rebuild")
    if in_use(path):
        raise InputError(f"{path} is being trained: its tracker is written by that process; wait for its end")
    tree = settings.tracking.model_dump() | ({"tracker": tracker} if tracker else {})
    mirror = Mirror(validate(TrackingSettings, tree, "instep runs sync"), path, note)
    if mirror.tracker is None:
        raise InputError(
            "no tracker to rebuild: the run has none, or Trackio is not installed (pip install 'instep[trackio]'); "
            "name one with --tracker"
        )
    with mirror:
        config = dict(flatten(settings.model_dump(mode="json", exclude_none=True)))
        mirror.begin(run.id, config)
    if mirror.failed:
        raise TrainingError(f"tracker {mirror.tracker} did not take every record of {path}")
    return {"tracker": mirror.tracker, "id": run.id, "records": mirror.records}
