"""Evaluation: a model and its adapters answer the same tasks, judged as the rewards judge them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from instep import __version__, engines, models
from instep.adapters import CONFIG_FILE as ADAPTER_CONFIG
from instep.config import EvaluationSettings, RewardSettings
from instep.engines.base import Engine, EngineState, LoadReport, Sampling
from instep.errors import InputError
from instep.evaluation import Outcome, summarise
from instep.files import write_atomically
from instep.loops.grpo import HELD_OUT_KEY
from instep.loops.listener import Listener, StopFlag, Stopped
from instep.loops.prompts import check_prompts, prompt_renderer
from instep.loops.run import adapter_folder, adapter_state, load_trained
from instep.records import Rollout, StopReason
from instep.rendering.template import Renderer
from instep.rewards import Rewards
from instep.rollouts import sample_rollouts
from instep.runs.folder import CONFIG, STAGES
from instep.settings_file import read_tree
from instep.tasks import Task, load_tasks, tags_of

FORMATS = RewardSettings(functions=("soft_format", "strict_format"))
"""Besides the judge's verdict, these rewards say whether a completion has the asked-for format."""


@dataclass(frozen=True)
class Evaluation:
    """`result` is what is stored and shown; `completions` has one record for each completion that was judged."""

    result: dict[str, Any]
    completions: list[dict[str, Any]]


@dataclass(frozen=True)
class _Pass:
    """One model answering all tasks in one way."""

    model: str
    mode: str
    samples: int
    temperature: float
    adapter: EngineState | None


@dataclass(frozen=True)
class Subject:
    """What is asked and who judges; made without weights."""

    tasks: list[Task]
    split: str
    renderer: Renderer
    rewards: Rewards
    folder: Path


def prepare(settings: EvaluationSettings) -> Subject:
    """Tasks, renderer and judge, checked before weights load. Close `rewards`. Raises InputError."""
    tags = tags_of(settings.task)
    folder = models.resolve(settings.model.path, settings.model.revision)
    renderer = prompt_renderer(folder)
    chosen = getattr(load_tasks(settings.task, settings.seed), settings.split)
    tasks = chosen.take(settings.tasks)
    check_prompts(tasks, renderer, folder, settings.max_new_tokens, tags)
    return Subject(tasks, chosen.name, renderer, Rewards(FORMATS, tags, settings.max_new_tokens), folder)


def run_evaluation(settings: EvaluationSettings, listener: Listener) -> Evaluation | None:
    """Measure as the settings say; None where it was interrupted.

    Raises InputError for what the user can mend; adapters, tasks and prompts are checked before the weights load.
    """
    adapters = _adapters(settings)
    name, why = engines.choose(settings.engine, settings.model)
    listener.note(f"engine: {name} ({why})")
    subject = prepare(settings)
    try:
        if len(subject.tasks) < settings.tasks:
            listener.note(f"{subject.split} has {len(subject.tasks)} tasks, fewer than {settings.tasks}")
        first = next(iter(settings.adapters.values()), None)
        engine, report = load_trained(name, settings.model, subject.folder, first, settings.seed)
        began = time.perf_counter()
        with StopFlag() as stop:
            try:
                judged = measure(settings, subject, engine, adapters, listener, stop)
            except Stopped:
                return None
        return conclude(settings, subject, report, judged, time.perf_counter() - began)
    finally:
        subject.rewards.close()


def _adapters(settings: EvaluationSettings) -> dict[str, EngineState]:
    """Name → adapter, all of one shape: they take turns in one loaded model."""
    states: dict[str, EngineState] = {}
    first = None
    for name, path in settings.adapters.items():
        states[name], found = adapter_state(path)
        shape = (found.rank, found.alpha, frozenset(found.target_modules))
        if first is not None and shape != first:
            raise InputError(
                f"adapter {path} differs from the first one in rank, alpha or target_modules: "
                "evaluate them one by one"
            )
        first = shape
    return states


def _passes(settings: EvaluationSettings, adapters: dict[str, EngineState]) -> Iterator[_Pass]:
    subjects: list[tuple[str, EngineState | None]] = list(adapters.items())
    if settings.base:
        subjects.insert(0, ("base" if adapters else "model", None))
    for name, state in subjects:
        if settings.greedy:
            yield _Pass(name, "greedy", 1, 0.0, state)
        if settings.samples:
            yield _Pass(name, "sampled", settings.samples, settings.temperature, state)


def measure(
    settings: EvaluationSettings,
    subject: Subject,
    engine: Engine,
    adapters: dict[str, EngineState],
    listener: Listener,
    stop: StopFlag,
) -> list[tuple[_Pass, list[tuple[Task, Rollout, Outcome]]]]:
    """Every pass with its judged completions, task by task. Raises Stopped where a stop was asked for."""
    passes = list(_passes(settings, adapters))
    total = len(subject.tasks) * sum(one.samples for one in passes)
    done, began = 0, time.perf_counter()
    judged: list[tuple[_Pass, list[tuple[Task, Rollout, Outcome]]]] = []
    for one in passes:
        if one.adapter is not None:
            engine.load_state(one.adapter)
        rows: list[tuple[Task, Rollout, Outcome]] = []
        at_once = max(1, settings.completions_per_batch // one.samples)
        for start in range(0, len(subject.tasks), at_once):
            listener.phase(f"{one.model}, {one.mode}", done, total)
            tasks = subject.tasks[start : start + at_once]
            rows += _answer(settings, subject, engine, one, tasks, start, stop)
            done += len(tasks) * one.samples
            seconds = time.perf_counter() - began
            right = sum(outcome.verdict == "correct" for _, _, outcome in rows)
            record = {
                "kind": "evaluation",
                "model": one.model,
                "mode": one.mode,
                "done": done,
                "total": total,
                "accuracy": right / len(rows),
                "seconds": seconds,
            }
            listener.metrics(record, seconds / done * (total - done))
        judged.append((one, rows))
    return judged


def _answer(
    settings: EvaluationSettings,
    subject: Subject,
    engine: Engine,
    one: _Pass,
    tasks: Sequence[Task],
    start: int,
    stop: StopFlag,
) -> list[tuple[Task, Rollout, Outcome]]:
    renderer = subject.renderer
    sampling = Sampling(
        settings.max_new_tokens, one.temperature, stop_tokens=renderer.stop_tokens, seed=settings.seed
    )
    keys = [HELD_OUT_KEY + start + index for index in range(len(tasks))]
    sampled = sample_rollouts(
        engine, renderer, tasks, one.samples, sampling, keys, settings.stop_strings,
        adapter=one.adapter is not None, on_token=stop.check,
    )  # fmt: skip
    flat = [
        (task, rollout) for task, (_, rollouts) in zip(tasks, sampled, strict=True) for rollout in rollouts
    ]
    return [(*pair, outcome) for pair, outcome in zip(flat, judge(subject.rewards, flat), strict=True)]


def judge(rewards: Rewards, pairs: Sequence[tuple[Task, Rollout]]) -> list[Outcome]:
    """The outcome of each (task, completion), by the extractor, comparison and formats that rewards use."""
    formats = rewards.score([task for task, _ in pairs], [rollout for _, rollout in pairs])
    outcomes = []
    for index, (task, rollout) in enumerate(pairs):
        outcomes.append(
            Outcome(
                verdict=rewards.judge.verdict(rollout.text, task.answer, task.columns.get("gym")),
                answer=rewards.judge.extract(rollout.text),
                formatted=bool(formats["soft_format"][index]),
                tokens=len(rollout.tokens),
                truncated=rollout.stop is StopReason.LENGTH,
                strict=bool(formats["strict_format"][index]),
            )
        )
    return outcomes


def conclude(
    settings: EvaluationSettings,
    subject: Subject,
    report: LoadReport,
    judged: Sequence[tuple[_Pass, list[tuple[Task, Rollout, Outcome]]]],
    seconds: float,
) -> Evaluation:
    results: dict[str, dict[str, dict[str, float]]] = {}
    completions = []
    for one, rows in judged:
        grouped = [
            [outcome for _, _, outcome in rows[start : start + one.samples]]
            for start in range(0, len(rows), one.samples)
        ]
        ks = settings.k or tuple(sorted({1, one.samples}))
        metrics = summarise(grouped, ks if one.samples > 1 else ())
        del metrics["tasks"], metrics["samples"]
        results.setdefault(one.model, {})[one.mode] = {
            f"{subject.split} {name}": value for name, value in metrics.items()
        }
        for task, rollout, outcome in rows:
            completions.append(
                {
                    "model": one.model,
                    "mode": one.mode,
                    "task": task.id,
                    "question": task.question,
                    "gold": task.answer,
                    "completion": rollout.text,
                    "stop": rollout.stop.value,
                    **asdict(outcome),
                }
            )
    result = {
        "instep": __version__,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "split": subject.split,
        "tasks": len(subject.tasks),
        "confidence": 0.95,
        "results": results,
        "engine": report.engine,
        "device": report.device,
        "precision": report.precision,
        "seconds": seconds,
        "comparison_timeouts": subject.rewards.judge.timeouts,
        "settings": settings.model_dump(mode="json", exclude_none=True),
    }
    return Evaluation(result, completions)


def store(evaluation: Evaluation, file: Path) -> None:
    """Write the result and, beside it, `<name>.completions.jsonl`. Raises InputError where `file` exists."""
    refuse_existing_file(file)
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in evaluation.completions)
    write_atomically(file.with_suffix(".completions.jsonl"), rows)
    text = json.dumps(evaluation.result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(file, text)


def refuse_existing_file(file: Path) -> None:
    """Raises InputError where there is something: a result is never overwritten."""
    if file.exists():
        raise InputError(f"{file} already exists: a result is never overwritten; choose another name")


def result_file(run: Path, task: str) -> Path:
    """A name in the run's folder that is not taken: `evaluations/<local time>-<task>.json`."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", Path(task).stem).strip("-").lower()
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{plain}"
    for number in range(1, 1000):
        file = run / "evaluations" / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        if not file.exists():
            return file
    raise InputError(f"{run / 'evaluations'} holds a thousand results of this second")


# --- what is evaluated ---------------------------------------------------------------------------------------

FORMAT_SETTINGS = ("reasoning_tag", "answer_tag", "system_prompt", "few_shot")
"""Settings of a run's task that belong to the format it was trained on, and go with it to another task."""


def settings_of(target: str, task: str | None = None) -> tuple[dict[str, Any], Path | None]:
    """(evaluation settings, run folder) that a run, an adapter folder or a model brings along.

    `task` is the task that is asked for where it is not the run's own. Raises InputError for a run without result.
    """
    path = Path(target).expanduser()
    if (path / STAGES).is_file():
        names = ", ".join(sorted(str(one.parent) for one in path.glob(f"*/{CONFIG}"))) or "none yet"
        raise InputError(f"{path} is a run of several stages: evaluate one of them ({names})")
    if (path / ADAPTER_CONFIG).is_file():
        config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        model = config.get("base_model_name_or_path") if isinstance(config, dict) else None
        if not model:
            raise InputError(f"{path / ADAPTER_CONFIG} does not name its base model: add --set model.path=…")
        return {"model": {"path": model}, "adapters": {"adapter": target}}, None
    if not (path / CONFIG).is_file():
        return {"model": {"path": target}}, None
    run = read_tree(str(path / CONFIG))
    tree: dict[str, Any] = {"seed": run.get("seed", 0), "model": run.get("model", {})}
    if run.get("adapter", {}).get("kind") == "full":
        if not (path / "model").is_dir():
            raise InputError(f"run {path} has no model yet: it has not finished; go on with it (--resume)")
        tree["model"] = {**tree["model"], "path": str(path / "model")}
    else:
        adapter_folder(path)
        tree["adapters"] = {"adapter": target}
    own = run.get("task", {})
    if task is not None and own.get("name") != task:
        own = {name: own[name] for name in FORMAT_SETTINGS if name in own}
    tree["task"] = own
    rollouts = run.get("rollouts", {})
    tree |= {name: rollouts[name] for name in ("max_new_tokens", "stop_strings") if name in rollouts}
    return tree, path
