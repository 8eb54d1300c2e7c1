"""Any dataset of reasoning-gym: tasks made from a seed, without a network."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
from collections.abc import Mapping
from typing import Any

from instep.config import TaskSettings
from instep.errors import InputError
from instep.records import Message
from instep.tasks.prompts import build_prompt
from instep.tasks.task import Task, Tasks, TaskSet, question_hash

OWN_PARAMETERS = {"seed": "the run's seed and task.test_seed", "size": "task.train_size and task.test_size"}
# Looking further for held-out questions that differ: a dataset with few questions repeats itself.
ATTEMPTS_PER_TEST_TASK = 4
# Where gsm_symbolic and its kin keep the worked solution.
SOLUTION_KEYS = ("answer_cot", "solution")


def load_gym(settings: TaskSettings, seed: int) -> Tasks:
    """Training tasks of the run's seed and held-out tasks of `test_seed`, no question in both.

    Raises InputError for an unknown dataset (with close names), a parameter that it does not have or refuses,
    and a dataset that has no answer to compare with.
    """
    name, size = settings.name, settings.test_size
    held_out = _dataset(name, settings.test_seed, size * ATTEMPTS_PER_TEST_TASK, settings.parameters)
    test: dict[str, Task] = {}
    for index in range(len(held_out)):
        if len(test) == size:
            break
        task = _task(settings, held_out, index, "test", settings.test_seed)
        test.setdefault(question_hash(task.question), task)
    notes = ()
    if len(test) < size:
        # There are hardly more questions than these: half of them must stay to learn from.
        found = len(test)
        test = dict(list(test.items())[: found // 2])
        notes = (
            f"{name}: about {found} different questions with these parameters; {len(test)} are held out",
        )
    if not test:
        raise InputError(
            f"task {name!r} has one question only with these parameters: nothing can be held out"
        )
    tested = list(test.values())
    train = _dataset(name, seed, settings.train_size, settings.parameters)
    return Tasks(
        train=TaskSet(
            f"{name}/train",
            settings.train_size,
            lambda index: _task(settings, train, index, "train", seed),
            frozenset(test),
        ),
        test=TaskSet(f"{name}/test", len(tested), tested.__getitem__),
        notes=notes,
    )


def create(name: str, seed: int, size: int, parameters: Mapping[str, Any]) -> Any:
    """The reasoning-gym dataset itself; raises whatever it raises."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **parameters)


def _dataset(name: str, seed: int, size: int, parameters: Mapping[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            f"task {name!r} is made by reasoning-gym, which is not installed: pip install reasoning-gym"
        ) from error
    if name not in DATASETS:
        close = difflib.get_close_matches(name, [*DATASETS, "gsm8k"], n=3, cutoff=0.5)
        near = f"did you mean {', '.join(close)}?" if close else "see the list of reasoning-gym"
        raise InputError(
            f"task {name!r}: neither gsm8k, nor a reasoning-gym dataset, nor a .jsonl file; {near}"
        )
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - set(OWN_PARAMETERS)
    for parameter in parameters:
        if parameter in OWN_PARAMETERS:
            raise InputError(f"task.parameters.{parameter}: set by {OWN_PARAMETERS[parameter]} instead")
        if parameter not in known:
            raise InputError(
                f"task.parameters.{parameter}: unknown to {name}, which has {', '.join(sorted(known))}"
            )
    try:
        return create(name, seed, size, parameters)
    except (AssertionError, TypeError, ValueError) as error:
        given = json.dumps(dict(parameters), default=str)
        raise InputError(f"task {name!r} refuses the parameters {given}: {error}") from error


def _task(settings: TaskSettings, dataset: Any, index: int, split: str, seed: int) -> Task:
    entry = dataset[index]
    name, identity = settings.name, f"{settings.name}/{split}/{seed}/{index}"
    answer = entry["answer"]
    if answer is None or not str(answer).strip():
        raise InputError(
            f"task {name!r} is a task without answers (reasoning-gym only scores them): choose another"
        )
    metadata = entry.get("metadata", {})
    solution = next((str(metadata[key]) for key in SOLUTION_KEYS if metadata.get(key)), "")
    entry = {"question": entry["question"], "answer": str(answer), "metadata": metadata}
    return Task(
        id=identity,
        question=entry["question"],
        messages=build_prompt(settings, [Message("user", entry["question"].strip())], identity),
        answer=str(answer),
        source=f"{name}/{split}",
        solution=solution.partition("####")[0].strip(),
        columns={
            "gym": {
                "dataset": name,
                "parameters": dict(settings.parameters),
                "entry": entry,
                "scores": has_own_scorer(type(dataset)),
            }
        },
    )


@functools.lru_cache
def has_own_scorer(kind: type) -> bool:
    """Whether the dataset scores answers itself (several can be right) without evaluating the model's text.

    Some scorers call eval or sympy's parse_expr, which evaluates Python, on what the model wrote. These are
    never called; our own comparison decides there.
    """
    for owner in kind.__mro__:
        if "score_answer" in vars(owner):
            if owner.__name__ == "ProceduralDataset":
                return False
            source = inspect.getsource(inspect.getmodule(owner) or owner)
            return not any(word in source for word in ("eval(", "exec(", "parse_expr", "sympify"))
    return False
