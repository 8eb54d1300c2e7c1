"""Correct, wrong or no answer: the one judgement that the reward and the evaluation share."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from instep.errors import InputError
from instep.rewards.answers import Verdict, compare, extract_answer
from instep.rewards.arithmetic import reaches
from instep.rewards.worker import START_SECONDS, Worker, WorkerDied, WorkerTimeout
from instep.tasks.prompts import Tags

SYMBOLIC = "instep.rewards.symbolic:symbolic_equal"
PREPARE = "instep.rewards.symbolic:prepare"
GYM = "instep.rewards.symbolic:gym_correct"
MAX_REMEMBERED = 10_000


class Judge:
    """Compares answers; keeps the worker process that symbolic comparisons run in. Close it when done.

    A comparison that does not end within `timeout_seconds` is killed and the answer counts as wrong: what a
    model writes must not stop a run. `timeouts` counts them. Raises InputError without math-verify.
    """

    def __init__(self, tags: Tags, timeout_seconds: float) -> None:
        self._tags, self._timeout_seconds = tags, timeout_seconds
        if importlib.util.find_spec("math_verify") is None:
            raise InputError(
                "comparing answers needs math-verify, which is not installed: pip install math-verify"
            )
        self._worker = Worker()
        self._remembered: dict[tuple[str, str], bool] = {}
        self.timeouts = 0

    def extract(self, completion: str) -> str | None:
        return extract_answer(completion, self._tags)

    def verdict(self, completion: str, answer: str, gym: Mapping[str, Any] | None = None) -> Verdict:
        """`gym` is the column of that name of a reasoning-gym task, whose own rules can allow more answers."""
        given = self.extract(completion)
        if given is None:
            return Verdict.NO_ANSWER
        key = (given, answer if gym is None else f"{gym['dataset']}\n{gym['entry']['question']}\n{answer}")
        if key not in self._remembered:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[key] = self._correct(given, answer, gym)
        return Verdict.CORRECT if self._remembered[key] else Verdict.WRONG

    def verdicts(
        self, completions: Sequence[str], answers: Sequence[str], gyms: Sequence[Mapping[str, Any] | None]
    ) -> list[Verdict]:
        return [self.verdict(*row) for row in zip(completions, answers, gyms, strict=True)]

    def close(self) -> None:
        self._worker.close()

    def _correct(self, given: str, answer: str, gym: Mapping[str, Any] | None) -> bool:
        same = compare(given, answer)
        if same:
            return True
        if gym is not None and gym["dataset"] in ("countdown", "puzzle24"):
            metadata = gym["entry"]["metadata"]
            return reaches(given, metadata["numbers"], metadata.get("target", 24))
        if same is None and self._ask(SYMBOLIC, given, answer):
            return True
        return gym is not None and gym["scores"] and self._ask(GYM, given, gym)

    def _ask(self, function: str, *arguments: Any) -> bool:
        try:
            if not self._worker.running:
                # Importing sympy takes seconds on a busy machine: that is no fault of the answer.
                self._worker.call(PREPARE, timeout_seconds=START_SECONDS)
            return bool(self._worker.call(function, *arguments, timeout_seconds=self._timeout_seconds))
        except (WorkerTimeout, WorkerDied):
            self.timeouts += 1
            return False
