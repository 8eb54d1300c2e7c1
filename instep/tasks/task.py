"""A task: a prompt with a checkable answer. And a set of tasks of which none is held out twice."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from instep.errors import InputError
from instep.records import Message

RESERVED_COLUMNS = ("task", "gym", "completion_tokens", "truncated")
"""Columns that rewards are handed about every sample, beside `answer` and `tools`."""


@dataclass(frozen=True)
class Task:
    """One prompt and what is known about its answer.

    `question` is what distinguishes it (and what its hash is taken of); `messages` is the whole prompt,
    system prompt and few-shot examples included. `answer` is empty where none is known. `solution` is worked
    reasoning that leads to the answer, where the data has it. `columns` is handed to rewards: plain data.
    """

    id: str
    question: str
    messages: tuple[Message, ...]
    answer: str
    source: str
    """Data and split it comes from, such as `gsm8k/train`."""
    solution: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


def question_hash(question: str) -> str:
    """Hash (16 hexadecimal digits) of a question, the same whatever its case, spacing and Unicode form."""
    plain = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", question).casefold()).strip()
    return hashlib.sha256(plain.encode("utf-8")).hexdigest()[:16]


class TaskSet:
    """Tasks by index, made when they are asked for.

    `get(i)` is None where the question of task i is one of `held_out` (hashes); such indices are gathered in
    `dropped`, so that they can be counted and named.
    """

    def __init__(
        self, name: str, size: int, make: Callable[[int], Task], held_out: frozenset[str] = frozenset()
    ) -> None:
        self.name = name
        self._size, self._make, self._held_out = size, make, held_out
        self.dropped: set[int] = set()

    def __len__(self) -> int:
        return self._size

    def get(self, index: int) -> Task | None:
        if not 0 <= index < self._size:
            raise IndexError(f"task {index} of {self._size} in {self.name}")
        if index in self.dropped:
            return None
        task = self._make(index)
        if self._held_out and question_hash(task.question) in self._held_out:
            self.dropped.add(index)
            return None
        return task

    def take(self, count: int) -> list[Task]:
        """The first `count` tasks in their own order (fewer where there are not as many)."""
        taken: list[Task] = []
        for index in range(self._size):
            if len(taken) == count:
                break
            task = self.get(index)
            if task is not None:
                taken.append(task)
        return taken


@dataclass(frozen=True)
class Tasks:
    """What is trained on, what is held out, and what was left out of the training tasks and why."""

    train: TaskSet
    test: TaskSet
    notes: tuple[str, ...] = ()


def keep_apart(name: str, train: Sequence[Task], test: Sequence[Task]) -> Tasks:
    """Training tasks without the questions that are held out, and without repetitions; both are counted.

    Raises InputError where nothing is left to train or to test on.
    """
    unique: dict[str, Task] = {}
    for task in test:
        unique.setdefault(question_hash(task.question), task)
    kept: dict[str, Task] = {}
    leaked = repeated = 0
    for task in train:
        key = question_hash(task.question)
        if key in unique:
            leaked += 1
        elif key in kept:
            repeated += 1
        else:
            kept[key] = task
    notes = []
    if leaked:
        notes.append(f"{leaked} training tasks dropped: their question is held out for testing")
    if repeated:
        notes.append(f"{repeated} training tasks dropped: their question stands there already")
    if len(unique) < len(test):
        notes.append(f"{len(test) - len(unique)} held-out tasks dropped: their question stands there already")
    if not kept:
        raise InputError(f"{name}: no training task is left ({'; '.join(notes) or 'there is none'})")
    if not unique:
        raise InputError(f"{name}: no held-out task; give more tasks, or a test file")
    trained, tested = list(kept.values()), list(unique.values())
    return Tasks(
        train=TaskSet(f"{name}/train", len(trained), trained.__getitem__),
        test=TaskSet(f"{name}/test", len(tested), tested.__getitem__),
        notes=tuple(notes),
    )
