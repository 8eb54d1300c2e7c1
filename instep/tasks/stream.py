"""The order in which tasks are handed out: shuffled for each epoch from the seed, with a cursor to resume."""

from __future__ import annotations

import numpy as np

from instep.errors import InputError
from instep.tasks.task import Task, TaskSet


class TaskStream:
    """Endless tasks in an order that depends on the seed alone.

    `cursor` counts the places of that order that were passed, held-out ones included: a stream made with the
    same seed and that cursor goes on exactly there.
    """

    def __init__(self, tasks: TaskSet, seed: int, cursor: int = 0) -> None:
        if not len(tasks):
            raise InputError(f"{tasks.name}: no task to hand out")
        self._tasks, self._seed, self.cursor = tasks, seed, cursor
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        """How often all tasks were handed out."""
        return self.cursor // len(self._tasks)

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks. Raises InputError where every task of a whole epoch is held out."""
        taken: list[Task] = []
        skipped = 0
        while len(taken) < count:
            task = self._tasks.get(self._index(self.cursor))
            self.cursor += 1
            if task is not None:
                taken.append(task)
                skipped = 0
            elif (skipped := skipped + 1) >= len(self._tasks):
                raise InputError(
                    f"{self._tasks.name}: each of its {len(self._tasks)} questions is held out for testing; "
                    "make the held-out set smaller, or choose parameters with more different questions"
                )
        return taken

    def _index(self, cursor: int) -> int:
        epoch, place = divmod(cursor, len(self._tasks))
        if self._order is None or self._order[0] != epoch:
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._tasks))
            self._order = (epoch, order)
        return int(self._order[1][place])
