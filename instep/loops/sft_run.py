"""A whole SFT run: data, engine, folder, training, adapter, summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from instep import __version__, engines
from instep.adapters import save_adapter
from instep.config import SftSettings
from instep.engines.base import Engine
from instep.errors import InputError
from instep.loops.listener import Listener, StopFlag
from instep.loops.sft import SftLoop
from instep.loops.sft_data import SftData, prepare
from instep.runs.checkpoint import Progress, load_checkpoint
from instep.runs.folder import CONFIG, RunFolder, default_folder, refuse_existing
from instep.runs.full_model import save_full_model
from instep.settings_file import dump_settings, load_resolved

CHANGEABLE_ON_RESUME = ("epochs", "max_steps", "max_minutes", "model.device", "run")


def run_sft(settings: SftSettings, listener: Listener, resume: bool = False) -> dict[str, Any]:
    """Train as the settings say and return the run's summary; `finished` is False where it was interrupted.

    A new run makes its folder only when the data and the model have loaded, so that wrong input leaves
    nothing behind. Raises InputError for what the user can mend, TrainingError where training cannot go on.
    """
    path = Path(settings.run.folder) if settings.run.folder else default_folder(settings.model.path)
    if not resume:
        refuse_existing(path)
    engine_name, why = engines.choose(settings.engine)
    listener.note(f"engine: {engine_name} ({why})")
    data = prepare(settings)
    for name, choice in data.choices.items():
        listener.note(f"{name}: {choice}")
    engine = engines.create(engine_name)
    model = settings.model.model_copy(update={"path": str(data.model_folder)})
    report = engine.load(model, settings.adapter, settings.optimizer, settings.seed)
    listener.note(
        f"model: {settings.model.path}, {report.parameters / 1e6:.1f} M parameters on {report.device} in "
        f"{report.precision}, {report.trainable_parameters / 1e6:.2f} M trained"
    )
    for name, choice in report.choices.items():
        listener.note(f"{name}: {choice}")
    run, progress = open_run(path, settings, data, engine, resume)
    try:
        if progress.step:
            listener.note(f"going on after step {progress.step}")
        loop = SftLoop(engine, data, settings, run, listener, progress)
        with StopFlag() as stop:
            finished = loop.train(stop)
        loop.log.close()
        adapter_from = write_adapter(engine, data, settings, run, loop.progress) if finished else None
        summary = summarise(settings, data, engine_name, report.__dict__, loop, finished, adapter_from)
        summary["folder"] = str(run.path)
        run.write_summary(summary)
        return summary
    finally:
        run.close()


def resumed_settings(path: Path, asked: dict[str, Any]) -> SftSettings:
    """The settings of an existing run, with those of `asked` (nested) that may change when going on.

    Raises InputError for one that would make it another run.
    """
    if not (path / CONFIG).is_file():
        raise InputError(f"{path} is not a run folder: it holds no {CONFIG}; start a run without --resume")
    tree = load_resolved(SftSettings, path / CONFIG).model_dump(mode="json", exclude_none=True)
    for name, value in asked.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        same = place.get(last) == value
        if not same and name not in CHANGEABLE_ON_RESUME and parents[:1] != ["run"]:
            raise InputError(
                f"{name} cannot change when a run goes on (it is {place.get(last)!r} in {path / CONFIG}): "
                f"start a new run, or change only {', '.join(CHANGEABLE_ON_RESUME)}"
            )
        place[last] = value
    tree.setdefault("run", {})["folder"] = str(path)
    return SftSettings.model_validate(tree)


def open_run(
    path: Path, settings: SftSettings, data: SftData, engine: Engine, resume: bool
) -> tuple[RunFolder, Progress]:
    """A new folder, or an existing one with its last checkpoint loaded into the engine."""
    fresh = Progress(seed=settings.seed, data_fingerprint=data.fingerprint)
    if not resume:
        return RunFolder.create(path, dump_settings(settings)), fresh
    run = RunFolder.reopen(path)
    if not run.checkpoint("last").is_dir():
        return run, fresh
    state, progress = load_checkpoint(run.checkpoint("last"))
    if progress.data_fingerprint != data.fingerprint:
        run.close()
        raise InputError(
            f"the data of {path} have changed since its checkpoint was written, so going on would not be the same "
            "run: restore the data, or start a new run"
        )
    engine.load_state(state)
    return run, progress


def write_adapter(
    engine: Engine, data: SftData, settings: SftSettings, run: RunFolder, progress: Progress
) -> str:
    """Write what was trained where a user looks for it; returns which checkpoint it is."""
    best = run.checkpoint("best")
    if best.is_dir() and progress.best_step != progress.step:
        state, which = load_checkpoint(best)[0], f"best (step {progress.best_step})"
    else:
        state, which = engine.state(), f"last (step {progress.step})"
    if settings.adapter.kind == "full":
        save_full_model(run.path / "model", state, data.model_folder)
    else:
        save_adapter(run.adapter, state, settings.adapter, settings.model.path)
    return which


def summarise(
    settings: SftSettings,
    data: SftData,
    engine: str,
    report: dict[str, Any],
    loop: SftLoop,
    finished: bool,
    adapter_from: str | None,
) -> dict[str, Any]:
    progress = loop.progress
    seconds = progress.training_seconds
    return {
        "instep": __version__,
        "finished": finished,
        "engine": engine,
        "device": report["device"],
        "precision": report["precision"],
        "model": settings.model.path,
        "steps": progress.step,
        "total_steps": loop.schedule.total_steps,
        "skipped_steps": progress.skipped_steps,
        "training_seconds": seconds,
        "supervised_tokens": progress.supervised_tokens,
        "supervised_tokens_per_second": progress.supervised_tokens / seconds if seconds else None,
        "validation_before": progress.first_validation,
        "validation_after": progress.last_validation,
        "validation_best": {"loss": progress.best_validation_loss, "step": progress.best_step},
        "adapter_from": adapter_from,
        "data": data.report(),
    }
