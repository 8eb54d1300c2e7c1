"""Tasks: prompts with a checkable answer, kept apart into what is trained on and what is held out."""

from __future__ import annotations

from instep.config import TaskSettings
from instep.tasks.gsm8k import load_gsm8k
from instep.tasks.gym import load_gym
from instep.tasks.own import load_own
from instep.tasks.prompts import Tags, check_tags_closed, demonstration, tags_of
from instep.tasks.stream import TaskStream
from instep.tasks.task import Task, Tasks, TaskSet, question_hash

__all__ = [
    "Tags",
    "Task",
    "TaskSet",
    "TaskStream",
    "Tasks",
    "check_tags_closed",
    "demonstration",
    "load_tasks",
    "question_hash",
    "tags_of",
]


def load_tasks(settings: TaskSettings, seed: int, answers_required: bool = True) -> Tasks:
    """The tasks that the settings name; `seed` makes the training tasks of reasoning-gym.

    `answers_required` False allows a JSONL of one's own without answers (for rewards that need none).
    Raises InputError: unknown task, unreadable file, a task without an answer, a prompt that opens a tag.
    """
    if settings.kind == "gsm8k":
        return load_gsm8k(settings)
    if settings.kind == "jsonl":
        return load_own(settings, answers_required)
    return load_gym(settings, seed)
