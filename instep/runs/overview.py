"""What a run folder tells about its run: settings that differ from the defaults, figures, how it ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instep.config import GrpoSettings, SftSettings
from instep.errors import InputError
from instep.runs.folder import CONFIG, STAGES, RunFolder, in_use
from instep.runs.heartbeat import read_heartbeat, silent_end
from instep.runs.metrics import read_metrics
from instep.settings_file import flatten, load_resolved, read_tree

LOWER_IS_BETTER = ("loss",)
FOLLOWED = ("loss", "token_accuracy", "reward")
"""Figures whose first, last and best values are told; every reward of its own too."""


def find_runs(folder: Path) -> list[Path]:
    """Run folders in a folder, and the stages of runs of several, newest first. Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: expected one that holds run folders, such as runs")
    found = [path for path in _inside(folder) if (path / CONFIG).is_file()]
    return sorted(found, key=lambda path: (path / CONFIG).stat().st_mtime, reverse=True)


def _inside(folder: Path) -> Iterator[Path]:
    if (folder / CONFIG).is_file():
        yield folder
    for path in folder.iterdir():
        if path.is_dir():
            yield path
            if (path / STAGES).is_file():
                yield from (stage for stage in path.iterdir() if stage.is_dir())


def load_run_settings(path: Path) -> SftSettings | GrpoSettings:
    """The resolved settings of a run. Raises InputError where the folder is no run."""
    if not (path / CONFIG).is_file():
        raise InputError(f"{path} is not a run folder: it holds no {CONFIG}; see `instep runs list`")
    kind = GrpoSettings if "rollouts" in read_tree(str(path / CONFIG)) else SftSettings
    return load_resolved(kind, path / CONFIG)


def changed_settings(settings: SftSettings | GrpoSettings) -> dict[str, tuple[Any, Any]]:
    """Dotted name → (value, default) of every setting that is not at its default."""
    given = dict(flatten(settings.model_dump(mode="json")))
    defaults = dict(flatten(type(settings)().model_dump(mode="json")))
    names = dict.fromkeys((*given, *defaults))
    return {
        name: (given.get(name), defaults.get(name)) for name in names if given.get(name) != defaults.get(name)
    }


def figures_of(path: Path) -> dict[str, dict[str, Any]]:
    """`train/loss` → first, last and best value with their steps, from metrics.jsonl."""
    found: dict[str, dict[str, Any]] = {}
    for record in read_metrics(path):
        for name, value in record.items():
            if value is None or not (name in FOLLOWED or name.startswith("reward/")):
                continue
            point = {"step": record["step"], "value": value}
            one = found.setdefault(f"{record['kind']}/{name}", {"first": point, "best": point})
            one["last"] = point
            best = one["best"]["value"]
            if value < best if name in LOWER_IS_BETTER else value > best:
                one["best"] = point
    return found


def state_of(path: Path) -> tuple[str, str | None]:
    """(running, finished, stopped, failed, killed or unknown; a sentence on it where there is more to say)."""
    last = read_heartbeat(path)
    if in_use(path):
        where = f"step {last.step}, {last.doing}, at {last.beat}" if last and last.ended is None else None
        return "running", where
    summary = RunFolder(path).read_summary() or {}
    if last is None:
        return ("finished" if summary["finished"] else "stopped") if summary else "unknown", None
    if last.ended is None:
        return "killed", silent_end(last)
    if last.ended.startswith("error"):
        return "failed", last.ended
    return last.ended.partition(" ")[0], None


def describe(path: Path) -> dict[str, Any]:
    """Everything that `instep runs show` tells."""
    settings = load_run_settings(path)
    run = RunFolder(path)
    summary = run.read_summary() or {}
    state, more = state_of(path)
    last = read_heartbeat(path)
    return {
        "folder": str(path),
        "id": run.known_id,
        "kind": "grpo" if isinstance(settings, GrpoSettings) else "sft",
        "model": settings.model.path,
        "state": state,
        "state_detail": more,
        "started": last.started if last else None,
        "last_sign_of_life": last.beat if last else None,
        "steps": max((record["step"] for record in read_metrics(run.metrics)), default=0),
        "total_steps": summary.get("total_steps"),
        "figures": figures_of(run.metrics),
        "settings": {
            name: {"value": value, "default": default}
            for name, (value, default) in changed_settings(settings).items()
        },
        "data": summary.get("data"),
        "summary": {name: value for name, value in summary.items() if name != "data"} or None,
    }
