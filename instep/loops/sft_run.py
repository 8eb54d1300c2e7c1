"""A whole SFT run: data, engine, folder, training, adapter, summary."""

from __future__ import annotations

from typing import Any

from instep import engines
from instep.config import SftSettings
from instep.errors import InputError
from instep.loops.attend import Attendance, tell_silent_end
from instep.loops.listener import Listener, StopFlag
from instep.loops.run import check_start, load_engine, open_run, run_path, summarise, write_result
from instep.loops.sft import SftLoop
from instep.loops.sft_data import prepare
from instep.runs.folder import refuse_existing
from instep.runs.mirror import Mirror


def run_sft(settings: SftSettings, listener: Listener, resume: bool = False) -> dict[str, Any]:
    """Train as the settings say and return the run's summary; `finished` is False where it was interrupted.

    A new run makes its folder only when the data and the model have loaded, so that wrong input leaves
    nothing behind. Raises InputError for what the user can mend, TrainingError where training cannot go on.
    """
    path = run_path(settings)
    if not resume:
        refuse_existing(path)
        check_start(settings)
    else:
        tell_silent_end(path, settings, listener)
    name, why = engines.choose(settings.engine, settings.model, settings.adapter)
    listener.note(f"engine: {name} ({why})")
    with Mirror(settings.tracking, path, listener.note) as mirror:
        data = prepare(settings)
        for choice, value in data.choices.items():
            listener.note(f"{choice}: {value}")
        engine, report = load_engine(name, settings, data.model_folder, listener)
        run, progress = open_run(path, settings, data.fingerprint, engine, resume)
        try:
            if progress.step:
                listener.note(f"going on after step {progress.step}")
            loop = SftLoop(engine, data, settings, run, listener, progress)
            with Attendance(settings, run, mirror, listener, progress.step) as attendance, StopFlag() as stop:
                finished = loop.attended_by(attendance).train(stop)
            loop.close()
            result_from = write_result(loop, settings, data.model_folder) if finished else None
            summary = summarise(loop, settings, report, finished, result_from)
            summary |= {"best_validation_loss": loop.progress.best_validation_loss, "data": data.report()}
            run.write_summary(summary)
            return summary
        except InputError:
            run.discard_if_new()
            raise
        finally:
            run.close()
