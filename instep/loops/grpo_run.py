"""A whole GRPO run: tasks, rewards, engine, folder, training, adapter, summary."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from instep import engines, models
from instep.config import GrpoSettings
from instep.engines.base import LoadReport
from instep.errors import InputError, TrainingError
from instep.loops.attend import Attendance, tell_silent_end
from instep.loops.grpo import GrpoData, GrpoLoop
from instep.loops.listener import Listener, StopFlag
from instep.loops.prompts import check_prompts, prompt_renderer
from instep.loops.run import check_start, load_engine, open_run, run_path, summarise, write_result
from instep.records import Rollout, StopReason
from instep.rendering.base_models import describe_loan
from instep.rewards import Rewards
from instep.runs.folder import RunFolder, refuse_existing
from instep.runs.mirror import Mirror
from instep.tasks import Tags, Task, Tasks, demonstration, load_tasks, tags_of

PROMPTS_CHECKED = 64
"""Prompts whose length is checked against the model's context before the weights load."""
TASKS_TRIED = 3
"""Worked answers that every reward is tried on before the weights load."""


def run_grpo(settings: GrpoSettings, listener: Listener, resume: bool = False) -> dict[str, Any]:
    """Train as the settings say and return the run's summary; `finished` is False where it was interrupted.

    Tasks, rewards, tokenizer and prompts are checked before the weights load. Raises InputError for what the
    user can mend, TrainingError where training cannot go on.
    """
    path = run_path(settings)
    if not resume:
        refuse_existing(path)
        check_start(settings)
    else:
        tell_silent_end(path, settings, listener)
    name, why = engines.choose(settings.engine, settings.model, settings.adapter)
    listener.note(f"engine: {name} ({why})")
    with Mirror(settings.tracking, path, listener.note) as mirror, prepare(settings) as (data, folder):
        told = [f"{name}: {why}" for name, why in describe_loan(data.renderer.tokenizer).items()]
        for note in [*data.tasks.notes, *told]:
            listener.note(note)
        engine, report = load_engine(name, settings, folder, listener)
        run, progress = open_run(path, settings, task_fingerprint(data.tasks), engine, resume)
        try:
            loop = GrpoLoop(engine, report.precision, data, settings, run, listener, progress)
            return _train(loop, settings, report, run, folder, mirror)
        except InputError:
            run.discard_if_new()
            raise
        finally:
            run.close()


@contextmanager
def prepare(settings: GrpoSettings) -> Iterator[tuple[GrpoData, Path]]:
    """Tasks, renderer and rewards, checked as far as that is possible without weights; and the model's folder.

    The rewards' processes end with the context. Raises InputError.
    """
    tags, new_tokens = tags_of(settings.task), settings.rollouts.max_new_tokens
    with Rewards(settings.rewards, tags, new_tokens) as rewards:
        tasks = load_tasks(settings.task, settings.seed, answers_required=rewards.needs_answers)
        folder = models.resolve(settings.model.path, settings.model.revision)
        renderer = prompt_renderer(folder)
        checked = [*tasks.train.take(PROMPTS_CHECKED), *tasks.test.take(PROMPTS_CHECKED)]
        check_prompts(checked, renderer, folder, new_tokens, tags)
        try_rewards(rewards, tasks.train.take(TASKS_TRIED), tags)
        yield GrpoData(tasks, renderer, rewards), folder


def _train(
    loop: GrpoLoop,
    settings: GrpoSettings,
    report: LoadReport,
    run: RunFolder,
    folder: Path,
    mirror: Mirror,
) -> dict[str, Any]:
    step = loop.progress.step
    if step:
        loop.listener.note(f"going on after step {step}")
    with Attendance(settings, run, mirror, loop.listener, step) as attendance, StopFlag() as stop:
        finished = loop.attended_by(attendance).train(stop)
    loop.close()
    result_from = write_result(loop, settings, folder) if finished else None
    summary = summarise(loop, settings, report, finished, result_from)
    summary |= {
        "task": loop.data.tasks.train.name,
        "rollouts": loop.progress.rollouts,
        "best_reward": loop.progress.best_reward,
    }
    run.write_summary(summary)
    return summary


def try_rewards(rewards: Rewards, tasks: Sequence[Task], tags: Tags) -> None:
    """Score worked answers, so that a reward that cannot work is found before the weights load.

    Raises InputError with what went wrong: an exception, a result of the wrong length or type.
    """
    texts = [demonstration(task, tags).messages[-1].content if task.answer else "" for task in tasks]
    rollouts = [
        Rollout(np.zeros(1, np.int32), np.zeros(1, np.float32), StopReason.END_OF_TURN, text)
        for text in texts
    ]
    try:
        rewards.score(tasks, rollouts)
    except TrainingError as error:
        raise InputError(f"tried on the answers of {len(tasks)} training tasks: {error}") from error


def task_fingerprint(tasks: Tasks) -> str:
    """sha256 over the number of tasks and the first of them: another data set or seed changes it."""
    digest = hashlib.sha256(f"{tasks.train.name} {len(tasks.train)}".encode())
    for task in tasks.train.take(PROMPTS_CHECKED):
        digest.update(f"{task.id}\0{task.question}\0{task.answer}\0".encode())
    return digest.hexdigest()
