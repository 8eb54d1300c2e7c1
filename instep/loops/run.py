"""What every run shares: the engine, the folder, going on with an earlier run, and what is left at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from instep import __version__, engines
from instep.adapters import CONFIG_FILE as ADAPTER_CONFIG
from instep.adapters import load_adapter, save_adapter
from instep.config import AdapterSettings, GrpoSettings, ModelSettings, OptimizerSettings, SftSettings
from instep.engines.base import Engine, EngineState, LoadReport
from instep.errors import InputError
from instep.files import write_atomically
from instep.loops.attend import first_line, is_out_of_memory
from instep.loops.listener import Listener
from instep.loops.loop import Loop
from instep.rendering.tokenizer import write_lent_template
from instep.runs.checkpoint import Progress, load_checkpoint
from instep.runs.folder import CONFIG, RunFolder, default_folder
from instep.runs.full_model import save_full_model
from instep.settings_file import dump_settings, load_resolved, validate

RunKind = TypeVar("RunKind", SftSettings, GrpoSettings)
CHANGEABLE_ON_RESUME = (
    "epochs",
    "max_steps",
    "max_minutes",
    "engine",
    "model.device",
    "model.gradient_checkpointing",
    "model.head_chunk",
    "rows_per_batch",
    "tokens_per_batch",
    "run",
    "tracking",
)
"""What does not make it another run: how long, where, and what changes memory and speed but not the step. The name
of a table stands for all that is in it."""


def changeable_on_resume(name: str) -> bool:
    """Whether a setting, by its dotted name, may change when a run goes on."""
    return name in CHANGEABLE_ON_RESUME or name.partition(".")[0] in CHANGEABLE_ON_RESUME


def run_path(settings: SftSettings | GrpoSettings) -> Path:
    """The run's folder: the one asked for, or one named after the time and the model."""
    return Path(settings.run.folder) if settings.run.folder else default_folder(settings.model.path)


def load_engine(
    name: str, settings: SftSettings | GrpoSettings, model_folder: Path, listener: Listener
) -> tuple[Engine, LoadReport]:
    """Create and load the engine, and tell every choice that was made."""
    engine = engines.create(name)
    model = settings.model.model_copy(update={"path": str(model_folder)})
    report = _load(engine, model, settings.adapter, settings.optimizer, settings.seed)
    listener.note(
        f"model: {settings.model.path}, {report.parameters / 1e6:.1f} M parameters on {report.device} in "
        f"{report.precision}, {report.trainable_parameters / 1e6:.2f} M trained"
    )
    for choice, value in report.choices.items():
        listener.note(f"{choice}: {value}")
    return engine, report


def _load(
    engine: Engine, model: ModelSettings, adapter: AdapterSettings, optimizer: OptimizerSettings, seed: int
) -> LoadReport:
    """`engine.load`; a model that memory has no room for is an InputError."""
    try:
        return engine.load(model, adapter, optimizer, seed)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"model {model.path} does not fit in memory ({first_line(error)}): close other programs, set "
            f"model.precision to bfloat16, or take a smaller model; `instep plan --model {model.path}` shows its needs"
        ) from error


def adapter_folder(path: str | Path) -> Path:
    """The adapter that a run folder holds, or the adapter folder itself. Raises InputError where there is none."""
    folder = Path(path).expanduser()
    if (folder / CONFIG).is_file() and not (folder / ADAPTER_CONFIG).is_file():
        if (folder / "model").is_dir():
            raise InputError(
                f"run {folder} trained every parameter: its result is the model {folder / 'model'}, not an adapter"
            )
        if not (folder / "adapter").is_dir():
            raise InputError(
                f"run {folder} has no adapter yet: it has not finished; go on with it (--resume --run {folder})"
            )
        return folder / "adapter"
    return folder


def adapter_state(path: str | Path) -> tuple[EngineState, AdapterSettings]:
    """A run's or folder's adapter as an engine takes it, its optimizer at the beginning. Raises InputError."""
    matrices, settings = load_adapter(adapter_folder(path))
    zeros = {name: np.zeros_like(value) for name, value in matrices.items()}
    return EngineState(matrices, zeros, zeros, 0), settings


def load_trained(
    engine_name: str,
    model: ModelSettings,
    model_folder: Path,
    adapter: str | Path | None = None,
    seed: int = 0,
) -> tuple[Engine, LoadReport]:
    """An engine with a model and, where given, a trained adapter (a run or an adapter folder), to sample from.

    `generate` and `score` with `adapter=False` are the model without it. Raises InputError.
    """
    state, settings = (None, AdapterSettings()) if adapter is None else adapter_state(adapter)
    engine = engines.create(engine_name)
    placed = model.model_copy(update={"path": str(model_folder)})
    report = _load(engine, placed, settings, OptimizerSettings(), seed)
    if state is not None:
        engine.load_state(state)
    return engine, report


def check_start(settings: SftSettings | GrpoSettings) -> EngineState | None:
    """The adapter that training begins from, if any. Raises InputError where it is not of the asked-for shape."""
    asked = settings.adapter
    if asked.start_from is None:
        return None
    state, found = adapter_state(asked.start_from)
    for name in ("rank", "alpha", "target_modules"):
        wanted, there = getattr(asked, name), getattr(found, name)
        # PEFT may keep the names in any order.
        same = set(wanted) == set(there) if name == "target_modules" else wanted == there
        if not same:
            raise InputError(
                f"adapter.start_from {asked.start_from}: its {name} is {there}, but adapter.{name} is {wanted}: "
                "make them the same"
            )
    return state


def resumed_settings(kind: type[RunKind], path: Path, asked: Mapping[str, Any]) -> RunKind:
    """The settings of an existing run, with those of `asked` (dotted names) that may change when going on.

    Raises InputError for one that would make it another run.
    """
    if not (path / CONFIG).is_file():
        raise InputError(f"{path} is not a run folder: it holds no {CONFIG}; start a run without --resume")
    tree = load_resolved(kind, path / CONFIG).model_dump(mode="json", exclude_none=True)
    for name, value in asked.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        same = place.get(last) == value
        if not same and not changeable_on_resume(name):
            raise InputError(
                f"{name} cannot change when a run goes on (it is {place.get(last)!r} in {path / CONFIG}): "
                f"start a new run, or change only {', '.join(CHANGEABLE_ON_RESUME)}"
            )
        place[last] = value
    tree.setdefault("run", {})["folder"] = str(path)
    return validate(kind, tree, str(path / CONFIG))


def open_run(
    path: Path, settings: SftSettings | GrpoSettings, data_fingerprint: str, engine: Engine, resume: bool
) -> tuple[RunFolder, Progress]:
    """A new folder, or an existing one with its last checkpoint loaded into the engine.

    A run without a checkpoint begins from `adapter.start_from`, where that is set.
    """
    fresh = Progress(seed=settings.seed, data_fingerprint=data_fingerprint)
    if not resume:
        _begin(engine, settings)
        return RunFolder.create(path, _stored(settings)), fresh
    run = RunFolder.reopen(path)
    try:
        if not run.checkpoint("last").is_dir():
            _begin(engine, settings)
            return run, fresh
        state, progress = load_checkpoint(run.checkpoint("last"))
        if progress.data_fingerprint != data_fingerprint:
            raise InputError(
                f"the data of {path} have changed since its checkpoint was written, so going on would not be the "
                "same run: restore the data, or start a new run"
            )
        engine.load_state(state)
        write_atomically(path / CONFIG, _stored(settings))
    except BaseException:
        run.close()
        raise
    return run, progress


def _begin(engine: Engine, settings: SftSettings | GrpoSettings) -> None:
    state = check_start(settings)
    if state is not None:
        engine.load_state(state)


def _stored(settings: SftSettings | GrpoSettings) -> str:
    """The resolved tree without the folder's own name, so that a folder may move and its config be reused."""
    run = settings.run.model_copy(update={"folder": None})
    return dump_settings(settings.model_copy(update={"run": run}))


def write_result(loop: Loop, settings: SftSettings | GrpoSettings, model_folder: Path) -> str:
    """Write what was trained where a user looks for it; returns which checkpoint it is."""
    run, progress = loop.run, loop.progress
    best = run.checkpoint("best")
    state, which = loop.engine.state(), f"last (step {progress.step})"
    if best.is_dir() and progress.best_step != progress.step:
        try:
            state, which = load_checkpoint(best)[0], f"best (step {progress.best_step})"
        except InputError as error:
            loop.listener.note(f"{error}; the result is that of the last step instead")
    if settings.adapter.kind == "full":
        save_full_model(run.path / "model", state, model_folder)
        write_lent_template(model_folder, run.path / "model")
    else:
        save_adapter(run.adapter, state, settings.adapter, settings.model.path, replace=True)
    return which


def summarise(
    loop: Loop,
    settings: SftSettings | GrpoSettings,
    report: LoadReport,
    finished: bool,
    result_from: str | None,
) -> dict[str, Any]:
    """What every kind of run says at its end."""
    progress = loop.progress
    return {
        "instep": __version__,
        "folder": str(loop.run.path),
        "finished": finished,
        "engine": report.engine,
        "device": report.device,
        "precision": report.precision,
        "model": settings.model.path,
        "steps": progress.step,
        "total_steps": loop.schedule.total_steps,
        "skipped_steps": progress.skipped_steps,
        "training_seconds": progress.training_seconds,
        "supervised_tokens": progress.supervised_tokens,
        "supervised_tokens_per_second": (
            progress.supervised_tokens / progress.training_seconds if progress.training_seconds else None
        ),
        "validation_before": progress.first_validation,
        "validation_after": progress.last_validation,
        "best_step": progress.best_step,
        "adapter_from": result_from,
    }
