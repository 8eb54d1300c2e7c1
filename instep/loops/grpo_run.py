"""A whole GRPO run: tasks, rewards, engine, folder, training, adapter, summary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from instep import engines, models
from instep.config import GrpoSettings
from instep.engines.base import LoadReport
from instep.errors import InputError
from instep.loops.grpo import GrpoData, GrpoLoop
from instep.loops.listener import Listener, StopFlag
from instep.loops.run import load_engine, open_run, run_path, summarise, write_result
from instep.rendering.template import Renderer
from instep.rendering.tokenizer import load_tokenizer
from instep.rewards import Rewards
from instep.runs.checkpoint import Progress
from instep.runs.folder import RunFolder, refuse_existing
from instep.tasks import Tasks, load_tasks, tags_of

PROMPTS_CHECKED = 64
"""Prompts whose length is checked against the model's context before the weights load."""


def run_grpo(settings: GrpoSettings, listener: Listener, resume: bool = False) -> dict[str, Any]:
    """Train as the settings say and return the run's summary; `finished` is False where it was interrupted.

    Tasks, rewards, tokenizer and prompts are checked before the weights load. Raises InputError for what the
    user can mend, TrainingError where training cannot go on.
    """
    path = run_path(settings)
    if not resume:
        refuse_existing(path)
    name, why = engines.choose(settings.engine)
    listener.note(f"engine: {name} ({why})")
    tags = tags_of(settings.task)
    with Rewards(settings.rewards, tags, settings.rollouts.max_new_tokens) as rewards:
        tasks = load_tasks(settings.task, settings.seed, answers_required=rewards.needs_answers)
        for note in tasks.notes:
            listener.note(note)
        folder = models.resolve(settings.model.path, settings.model.revision)
        renderer = Renderer(load_tokenizer(folder))
        check_prompts(tasks, renderer, folder, settings.rollouts.max_new_tokens)
        engine, report = load_engine(name, settings, folder, listener)
        run, progress = open_run(path, settings, task_fingerprint(tasks), engine, resume)
        try:
            loop = GrpoLoop(
                engine,
                report.precision,
                GrpoData(tasks, renderer, rewards),
                settings,
                run,
                listener,
                progress,
            )
            return _train(loop, settings, report, run, folder, progress, listener)
        finally:
            run.close()


def _train(
    loop: GrpoLoop,
    settings: GrpoSettings,
    report: LoadReport,
    run: RunFolder,
    folder: Path,
    progress: Progress,
    listener: Listener,
) -> dict[str, Any]:
    if progress.step:
        listener.note(f"going on after step {progress.step}")
    with StopFlag() as stop:
        finished = loop.train(stop)
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


def check_prompts(tasks: Tasks, renderer: Renderer, folder: Path, max_new_tokens: int) -> None:
    """Raises InputError where a prompt and its completion would not fit the model's context, or where nothing
    would ever end a completion."""
    if not renderer.stop_tokens:
        raise InputError(f"model {folder} has no stop token: its completions would never end")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = config.get("text_config", config)
    context = int(config.get("max_position_embeddings") or 2**31)
    for task in [*tasks.train.take(PROMPTS_CHECKED), *tasks.test.take(PROMPTS_CHECKED)]:
        length = len(renderer.prompt(task.messages, task.tools))
        if length + max_new_tokens > context:
            raise InputError(
                f"task {task.id}: its prompt of {length} tokens and rollouts.max_new_tokens = {max_new_tokens} do not "
                f"fit the model's context of {context}: lower max_new_tokens or leave the task out"
            )


def task_fingerprint(tasks: Tasks) -> str:
    """sha256 over the number of tasks and the first of them: another data set or seed changes it."""
    digest = hashlib.sha256(f"{tasks.train.name} {len(tasks.train)}".encode())
    for task in tasks.train.take(PROMPTS_CHECKED):
        digest.update(f"{task.id}\0{task.question}\0{task.answer}\0".encode())
    return digest.hexdigest()
