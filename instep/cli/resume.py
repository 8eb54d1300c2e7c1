"""Which settings a training command runs with: new ones, or those of a run to go on with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.errors import InputError
from instep.loops.run import RunKind, resumed_settings
from instep.runs.folder import CONFIG, RunFolder
from instep.settings_file import load_settings, parse_overrides


def settings_for(
    kind: type[RunKind],
    config: str | None,
    overrides: Sequence[str],
    flags: Mapping[str, Any],
    resume: bool,
) -> RunKind:
    """Resolved settings of the command line. Raises InputError for what does not go together."""
    if not resume:
        return load_settings(kind, config, overrides, flags)
    if config:
        raise InputError("--config and --resume exclude each other: a run goes on with its own config.toml")
    given = {name: value for name, value in flags.items() if value is not None}
    named = given.pop("run.folder", None)
    path = Path(named) if named else newest_unfinished(Path("runs"))
    return resumed_settings(kind, path, {**parse_overrides(overrides), **given})


def newest_unfinished(folder: Path) -> Path:
    """The run under `folder` that was used last and has not finished. Raises InputError where there is none."""
    if folder.is_dir():
        runs = [path for path in folder.iterdir() if (path / CONFIG).is_file()]
        for path in sorted(runs, key=lambda p: p.stat().st_mtime, reverse=True):
            summary = RunFolder(path).read_summary()
            if not (summary and summary.get("finished")):
                return path
    raise InputError(f"--resume: no unfinished run in {folder}/; name one with --run FOLDER")
