"""All rewards of a run: made and checked before the model loads, then applied to the rollouts of each step."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from instep.config import RewardSettings
from instep.errors import InputError, TrainingError
from instep.records import Rollout, StopReason
from instep.rewards.builtin import BUILTIN, NEED_ANSWERS, Context, Reward
from instep.rewards.judge import Judge
from instep.rewards.worker import Worker, WorkerDied, WorkError, WorkerTimeout
from instep.tasks.prompts import Tags
from instep.tasks.task import Task

LOAD, CALL = "instep.rewards.user_file:load", "instep.rewards.user_file:call"
EXCERPT = 120


class Rewards:
    """Scores rollouts by every reward of the settings. Close it (or use it as a context) when done.

    Raises InputError at construction: unknown name (with close ones), file that is missing or cannot be
    imported, function that is missing or cannot be called with the documented signature. `folder` is what the
    paths of user files are relative to.
    """

    def __init__(
        self, settings: RewardSettings, tags: Tags, max_new_tokens: int, folder: str | Path = "."
    ) -> None:
        self.settings = settings
        self.names = settings.functions
        self.judge = Judge(tags, settings.comparison_timeout_seconds)
        overlong = settings.overlong_tokens or math.ceil(max_new_tokens / 4)
        context = Context(tags, self.judge, max_new_tokens, overlong)
        self._builtin: dict[str, Reward] = {}
        self._users: dict[str, _UserReward] = {}
        try:
            for name in self.names:
                if ".py:" in name:
                    self._users[name] = _UserReward(name, Path(folder), settings.timeout_seconds)
                elif name in BUILTIN:
                    self._builtin[name] = BUILTIN[name](context)
                else:
                    raise InputError(f"reward {name!r}: {_advice(name)}")
        except InputError:
            self.close()
            raise

    @property
    def needs_answers(self) -> bool:
        """Whether a task without an answer could not be scored."""
        return bool(NEED_ANSWERS & set(self.names))

    def score(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """Reward name → float32 [N], NaN where the reward does not apply; sample i is rollout i of task i.

        Raises TrainingError that names the reward, the task and the completion: an exception, a result of the
        wrong length or type, one that is not finite, a function of one's own that ran out of time.
        """
        arguments = _arguments(tasks, rollouts)
        # Functions of one's own run in their processes while the built-in ones run here.
        for user in self._users.values():
            user.submit(arguments)
        results: dict[str, Any] = {}
        for name, reward in self._builtin.items():
            try:
                results[name] = reward(*arguments.values())
            except Exception as error:
                index = _first_that_raises(reward, arguments)
                raise self._failed(
                    name, tasks, rollouts, index, f"{type(error).__name__}: {error}"
                ) from error
        for name, user in self._users.items():
            values, index, reason = user.result(arguments)
            if reason is not None:
                raise self._failed(name, tasks, rollouts, index, reason)
            results[name] = values
        return {name: self._checked(name, results[name], tasks, rollouts) for name in self.names}

    def _checked(
        self, name: str, values: Sequence[Any], tasks: Sequence[Task], rollouts: Sequence[Rollout]
    ) -> np.ndarray:
        if len(values) != len(tasks):
            raise TrainingError(f"reward {name} returned {len(values)} values for {len(tasks)} samples")
        for index, value in enumerate(values):
            if value is not None and not math.isfinite(value):
                raise self._failed(
                    name, tasks, rollouts, index, f"returned {value}; expected a finite number or None"
                )
        return np.array([math.nan if value is None else value for value in values], dtype=np.float32)

    def _failed(
        self, name: str, tasks: Sequence[Task], rollouts: Sequence[Rollout], index: int, reason: str
    ) -> TrainingError:
        if not tasks:
            return TrainingError(f"reward {name}: {reason}")
        text = rollouts[index].text
        excerpt = text if len(text) <= EXCERPT else text[:EXCERPT] + "…"
        return TrainingError(f"reward {name}: {reason}; task {tasks[index].id}, completion {excerpt!r}")

    def close(self) -> None:
        """End the worker processes."""
        self.judge.close()
        for user in self._users.values():
            user.worker.close()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _UserReward:
    """One function of a user's file, in a process of its own."""

    def __init__(self, name: str, folder: Path, timeout_seconds: float) -> None:
        file, _, self._function = name.rpartition(":")
        path = folder / Path(file).expanduser()
        if not path.is_file():
            raise InputError(f"reward {name!r}: there is no file {path}")
        if not self._function:
            raise InputError(f"reward {name!r}: expected file.py:function")
        self._path, self._timeout_seconds = str(path.resolve()), timeout_seconds
        self.worker = Worker()
        try:
            self.worker.call(LOAD, self._path, self._function, timeout_seconds=timeout_seconds)
        except WorkError as error:
            reason = error.text if error.kind == "Refused" else f"{path} cannot be imported: {error}"
            self.worker.close()
            raise InputError(f"reward {name!r}: {reason}") from error
        except (WorkerTimeout, WorkerDied) as error:
            raise InputError(f"reward {name!r}: importing {path} {error}") from error

    def submit(self, arguments: Mapping[str, Any]) -> None:
        self.worker.submit(CALL, self._path, self._function, arguments)

    def result(self, arguments: Mapping[str, Any]) -> tuple[list[Any], int, str | None]:
        """(values, sample, reason): where there is a reason, it failed, at that sample as far as can be known."""
        try:
            return self.worker.result(self._timeout_seconds), 0, None
        except (WorkerTimeout, WorkerDied) as error:
            samples = len(arguments["completions"])
            return [], 0, f"{error}, in a batch of {samples} samples of which the first is"
        except WorkError as error:
            index, found = self._culprit(arguments, error)
            return [], index, f"raised {found}" if found.kind != "Refused" else found.text

    def _culprit(self, arguments: Mapping[str, Any], error: WorkError) -> tuple[int, WorkError]:
        """The first sample that raises when it is scored alone; the first of all where none does."""
        for index in range(len(arguments["completions"])):
            try:
                self.worker.call(
                    CALL,
                    self._path,
                    self._function,
                    _alone(arguments, index),
                    timeout_seconds=self._timeout_seconds,
                )
            except WorkError as found:
                return index, found
            except (WorkerTimeout, WorkerDied):
                break
        return 0, error


def _alone(arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The arguments for one sample."""
    columns = {key: values[index : index + 1] for key, values in arguments["columns"].items()}
    return {key: values[index : index + 1] for key, values in arguments.items() if key != "columns"} | {
        "columns": columns
    }


def _first_that_raises(reward: Reward, arguments: Mapping[str, Any]) -> int:
    """The first sample that raises when it is scored alone; the first of all where none does."""
    for index in range(len(arguments["completions"])):
        try:
            reward(*_alone(arguments, index).values())
        except Exception:  # noqa: BLE001 (the caller raises its cause)
            return index
    return 0


def _arguments(tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    if len(tasks) != len(rollouts):
        raise ValueError(f"{len(tasks)} tasks for {len(rollouts)} rollouts: one for each is needed")
    extra = sorted({key for task in tasks for key in task.columns} - {"gym"})
    columns: dict[str, list[Any]] = {key: [task.columns.get(key) for task in tasks] for key in extra}
    columns |= {
        "answer": [task.answer for task in tasks],
        "task": [task.id for task in tasks],
        "tools": [[dict(tool) for tool in task.tools] for task in tasks],
        "gym": [task.columns.get("gym") for task in tasks],
        "completion_tokens": [len(rollout.tokens) for rollout in rollouts],
        "truncated": [rollout.stop is StopReason.LENGTH for rollout in rollouts],
    }
    messages = [
        [{"role": message.role, "content": message.content} for message in task.messages] for task in tasks
    ]
    return {
        "prompts": [next((m["content"] for m in reversed(ms) if m["role"] == "user"), "") for ms in messages],
        "completions": [rollout.text for rollout in rollouts],
        "messages": messages,
        "columns": columns,
    }


def _advice(name: str) -> str:
    close = difflib.get_close_matches(name, BUILTIN, n=2)
    near = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{near}known are {', '.join(BUILTIN)}, and functions of a file of your own as file.py:function"
