"""Several runs from one file: warm-up, reinforcement, evaluation; each stage is skipped once it has finished.

    [model]                    # shared: every stage that has such a setting takes it
    path = "…"

    [[stage]]
    name = "format"            # also the name of its folder, 1-format
    kind = "sft"               # sft, grpo or eval; the rest are settings of that kind
    data.demonstrations = 400

    [[stage]]
    name = "grpo"
    kind = "grpo"
    start = "previous"         # the default after another training stage; or "base", or a stage's name

An eval stage measures the base model and the adapter of every training stage before it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from instep import __version__, engines
from instep.config import EvaluationSettings, GrpoSettings, SftSettings
from instep.errors import InputError
from instep.files import write_atomically
from instep.loops import evaluate, grpo_run, sft_data
from instep.loops.listener import Listener
from instep.loops.run import changeable_on_resume
from instep.loops.sft_run import run_sft
from instep.runs.folder import CONFIG, STAGES, SUMMARY, RunFolder, refuse_existing
from instep.settings_file import merge, parse_overrides, put, read_tree, unused_settings, validate

KINDS: dict[str, type[SftSettings] | type[GrpoSettings] | type[EvaluationSettings]] = {
    "sft": SftSettings,
    "grpo": GrpoSettings,
    "eval": EvaluationSettings,
}
OWN_KEYS = ("name", "kind", "start")
RESULT = "result.json"
AnySettings = SftSettings | GrpoSettings | EvaluationSettings


@dataclass(frozen=True)
class Stage:
    """One stage, resolved. `start` is the stage whose adapter it begins from, None for the base model."""

    number: int
    name: str
    kind: str
    start: str | None
    settings: AnySettings

    @property
    def folder(self) -> str:
        return f"{self.number}-{self.name}"


# --- the file ------------------------------------------------------------------------------------------------


def load_stages(
    source: str, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> list[Stage]:
    """The stages of a file or recipe, every setting validated.

    overrides  "a.b=c" for every stage that has the setting, or "<stage>.a.b=c" for one
    flags      dotted name → value, as shared overrides; None means not given
    Raises InputError that names the stage and the setting.
    """
    tree = read_tree(source)
    given = tree.pop("stage", None)
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise InputError(
            f"{source} has no stages: expected tables [[stage]] with name and kind; see `instep sft`"
        )
    heads = [_head(source, number, one) for number, one in enumerate(given, start=1)]
    names = [name for name, _ in heads]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{source}: two stages are called {name!r}: give each its own name")
    asked = parse_overrides(overrides) | {k: v for k, v in (flags or {}).items() if v is not None}
    used: set[str] = set()
    stages: list[Stage] = []
    for number, (one, (name, kind)) in enumerate(zip(given, heads, strict=True), start=1):
        where = f"{source}, stage {name}"
        own = {key: value for key, value in one.items() if key not in OWN_KEYS}
        fields = set(KINDS[kind].model_fields)
        demonstrates = kind != "sft" or bool(_demonstrations(own, asked, name))
        shared = {
            key: value for key, value in tree.items() if key in fields and (key != "task" or demonstrates)
        }
        used |= {key for key in tree if key in fields}
        settings = merge(shared, own)
        for key, value in asked.items():
            first, _, rest = key.partition(".")
            if first == name and rest:
                put(settings, rest, value)
            elif first not in names and first in fields and (first != "task" or demonstrates):
                put(settings, key, value)
        stages.append(_resolve(where, number, name, kind, one.get("start"), settings, stages))
    _all_used(source, set(tree) - used, asked, names, {kind for _, kind in heads})
    return stages


def _head(source: str, number: int, one: Mapping[str, Any]) -> tuple[str, str]:
    """(name, kind) of a stage."""
    kind, name = one.get("kind"), one.get("name", one.get("kind"))
    if kind not in KINDS:
        raise InputError(f"{source}, stage {number}: kind = {kind!r}: expected one of {', '.join(KINDS)}")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise InputError(f"{source}, stage {number}: name = {name!r}: expected letters, digits, - and _")
    settings = {field for one_kind in KINDS.values() for field in one_kind.model_fields}
    if name in settings:
        raise InputError(
            f"{source}, stage {number}: name = {name!r} is also a setting, so that --set {name}.… could mean both: "
            "choose another name"
        )
    return name, str(kind)


def _demonstrations(own: Mapping[str, Any], asked: Mapping[str, Any], name: str) -> Any:
    """Whether an sft stage is trained on demonstrations, and so has a use for the shared task."""
    data = own.get("data", {})
    inside = data.get("demonstrations") if isinstance(data, Mapping) else None
    return inside or asked.get(f"{name}.data.demonstrations") or asked.get("data.demonstrations")


def _resolve(
    where: str,
    number: int,
    name: str,
    kind: str,
    start: Any,
    settings: dict[str, Any],
    before: Sequence[Stage],
) -> Stage:
    for key in ("run.folder", "adapter.start_from", "adapters"):
        first, _, rest = key.partition(".")
        inside = settings.get(first, {})
        if (rest and isinstance(inside, Mapping) and rest in inside) or (not rest and first in settings):
            raise InputError(f"{where}: {key} is set by the stages themselves: remove it (see start)")
    resolved = validate(KINDS[kind], settings, where)
    for unused, reason in unused_settings(KINDS[kind], settings):
        raise InputError(f"{where}: {unused} is set but would not be used: {reason}; remove one of them")
    trained = [stage.name for stage in before if stage.kind != "eval"]
    if kind == "eval":
        if start is not None:
            raise InputError(
                f"{where}: start is for sft and grpo: an eval stage measures every stage before it"
            )
        return Stage(number, name, kind, None, resolved)
    if start in (None, "previous"):
        if start and not trained:
            raise InputError(f"{where}: start = 'previous', but no training stage stands before it")
        begin = trained[-1] if trained else None
    elif start == "base":
        begin = None
    elif start in trained:
        begin = start
    else:
        raise InputError(
            f"{where}: start = {start!r}: expected previous, base or one of {', '.join(trained)}"
        )
    if begin is not None:
        source = next(stage.settings for stage in before if stage.name == begin)
        assert not isinstance(source, EvaluationSettings) and not isinstance(resolved, EvaluationSettings)
        if source.adapter != resolved.adapter or source.model.path != resolved.model.path:
            raise InputError(
                f"{where}: it begins from stage {begin}, so model.path and adapter must be the same in both: "
                "write [model] and [adapter] once, above the stages"
            )
    return Stage(number, name, kind, begin, resolved)


def _all_used(
    source: str, unused: set[str], asked: Mapping[str, Any], names: Sequence[str], kinds: set[str]
) -> None:
    if unused:
        raise InputError(f"{source}: {sorted(unused)[0]!r} is a setting of none of the stages: remove it")
    known = {field for kind in kinds for field in KINDS[kind].model_fields}
    for key in asked:
        first = key.partition(".")[0]
        if first not in known and first not in names:
            raise InputError(
                f"--set {key}: neither a setting of a stage nor one of the stages ({', '.join(names)})"
            )


def dump_stages(stages: Sequence[Stage]) -> str:
    """Resolved stages as TOML that `load_stages` reads back to equal ones."""
    tables = [
        {
            "name": stage.name,
            "kind": stage.kind,
            **({} if stage.kind == "eval" else {"start": stage.start or "base"}),
            **_own_settings(stage.settings),
        }
        for stage in stages
    ]
    return tomli_w.dumps({"stage": tables})


def _own_settings(settings: AnySettings) -> dict[str, Any]:
    tree = settings.model_dump(mode="json", exclude_none=True)
    tree.pop("adapters", None)
    return tree


# --- checking everything before the first stage --------------------------------------------------------------


def preflight(stages: Sequence[Stage]) -> list[str]:
    """One line a stage: what it would do. Reads data, tasks, rewards and prompts; loads no weights.

    Raises InputError that names the stage.
    """
    lines = []
    for stage in stages:
        try:
            settings = stage.settings
            adapter = None if isinstance(settings, EvaluationSettings) else settings.adapter
            engines.choose(settings.engine, settings.model, adapter)
            lines.append(f"{stage.folder}: {_outlook(stage)}")
        except InputError as error:
            raise InputError(f"stage {stage.name}: {error}") from error
    return lines


def _outlook(stage: Stage) -> str:
    settings = stage.settings
    start = f"from the adapter of {stage.start}" if stage.start else "from the base model"
    if isinstance(settings, SftSettings):
        data = sft_data.prepare(settings)
        steps = settings.max_steps or round(settings.epochs * data.order.steps_per_epoch)
        count, length = data.train.report["conversations"], data.row_length
        return f"sft {start}, {count} conversations, rows of {length} tokens, {_limits(settings, steps)}"
    with ExitStack() as stack:
        if isinstance(settings, GrpoSettings):
            data, _ = stack.enter_context(grpo_run.prepare(settings))
            return (
                f"grpo {start}, {len(data.tasks.train)} tasks of {data.tasks.train.name}, "
                f"{settings.tasks_per_step} × {settings.rollouts.group_size} completions a step, "
                f"{_limits(settings, settings.max_steps)}"
            )
        subject = evaluate.prepare(settings)
        stack.callback(subject.rewards.close)
        return f"eval on {len(subject.tasks)} tasks of {subject.split}"


def _limits(settings: SftSettings | GrpoSettings, steps: int | None) -> str:
    limits = [f"{steps} steps"] if steps else []
    limits += [f"{settings.max_minutes:g} minutes"] if settings.max_minutes else []
    return "at most " + " or ".join(limits)


# --- running -------------------------------------------------------------------------------------------------


def open_stages(path: Path, stages: Sequence[Stage], resume: bool) -> list[Stage]:
    """Make the folder, or make sure that an existing one holds the same stages. Returns the stages to run.

    Raises InputError where the folder is something else, or where a setting differs that cannot change.
    """
    file = path / STAGES
    if not file.is_file():
        if resume:
            raise InputError(f"{path} is not a run of stages: it holds no {STAGES}; start without --resume")
        refuse_existing(path)
        write_atomically(file, dump_stages(stages))
        return list(stages)
    _same(path, load_stages(str(file)), stages)
    write_atomically(file, dump_stages(stages))
    return list(stages)


def _same(path: Path, old: Sequence[Stage], new: Sequence[Stage]) -> None:
    shapes = [[(stage.name, stage.kind, stage.start) for stage in some] for some in (old, new)]
    if shapes[0] != shapes[1]:
        raise InputError(
            f"{path} holds other stages ({', '.join(s.name for s in old)}): choose another --run"
        )
    for before, after in zip(old, new, strict=True):
        for name, was, _ in _differences(_own_settings(before.settings), _own_settings(after.settings)):
            if not changeable_on_resume(name) or finished(path, before):
                raise InputError(
                    f"{before.name}.{name} cannot change when a run goes on (it is {was!r} in {path / STAGES}): "
                    "choose another --run"
                )


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys((*old, *new)):
        was, now = old.get(key), new.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            yield from _differences(was, now, f"{prefix}{key}.")
        elif was != now:
            yield f"{prefix}{key}", was, now


def finished(path: Path, stage: Stage) -> bool:
    folder = path / stage.folder
    if stage.kind == "eval":
        return (folder / RESULT).is_file()
    summary = RunFolder(folder).read_summary()
    return bool(summary and summary.get("finished"))


def run_stages(path: Path, stages: Sequence[Stage], listener: Listener) -> dict[str, Any]:
    """Run what has not finished yet, in order. `finished` of the summary is False where it was interrupted."""
    began = time.perf_counter()
    done: list[dict[str, Any]] = []
    result = None
    for stage in stages:
        ended = finished(path, stage)
        listener.note(f"stage {stage.folder}: {'finished already' if ended else stage.kind}")
        if stage.kind == "eval":
            result = (
                _read(path / stage.folder / RESULT) if ended else _evaluate(path, stage, stages, listener)
            )
            outcome = result if result is None else {"finished": True, "seconds": result["seconds"]}
        else:
            outcome = _read(path / stage.folder / SUMMARY) if ended else _train(path, stage, stages, listener)
        done.append({"stage": stage.name, "kind": stage.kind, "skipped": ended, "summary": outcome})
        if not outcome or not outcome["finished"]:
            break
    summary = {
        "instep": __version__,
        "folder": str(path),
        "finished": len(done) == len(stages)
        and bool(done[-1]["summary"] and done[-1]["summary"]["finished"]),
        "seconds": time.perf_counter() - began,
        "stages": done,
        "evaluation": result,
    }
    write_atomically(
        path / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )
    return summary


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _train(path: Path, stage: Stage, stages: Sequence[Stage], listener: Listener) -> dict[str, Any]:
    settings, folder = stage.settings, path / stage.folder
    assert not isinstance(settings, EvaluationSettings)
    begin = next((path / one.folder for one in stages if one.name == stage.start), None)
    adapter = settings.adapter.model_copy(update={"start_from": str(begin) if begin else None})
    run = settings.run.model_copy(update={"folder": str(folder)})
    settings = settings.model_copy(update={"adapter": adapter, "run": run})
    resume = (folder / CONFIG).is_file()
    if isinstance(settings, SftSettings):
        return run_sft(settings, listener, resume)
    return grpo_run.run_grpo(settings, listener, resume)


def _evaluate(path: Path, stage: Stage, stages: Sequence[Stage], listener: Listener) -> dict[str, Any] | None:
    assert isinstance(stage.settings, EvaluationSettings)
    earlier = stages[: stage.number - 1]
    adapters = {one.name: str(path / one.folder) for one in earlier if one.kind != "eval"}
    evaluation = evaluate.run_evaluation(stage.settings.model_copy(update={"adapters": adapters}), listener)
    if evaluation is None:
        return None
    evaluate.store(evaluation, path / stage.folder / RESULT)
    return evaluation.result
