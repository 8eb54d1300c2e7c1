"""Prompts of one exact length for both sides of a GRPO benchmark, made once by instep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.config import TaskSettings
from instep.loops.prompts import prompt_renderer
from instep.records import Message
from instep.tasks import load_tasks

Prompt = list[dict[str, str]]


def of_length(model: Path, gsm8k: str | None, length: int, count: int) -> list[Prompt]:
    """`count` different user messages that the model's template renders to exactly `length` tokens: GSM8K
    questions, as many as are needed, ended at a word. Raises ValueError where the data give fewer."""
    renderer = prompt_renderer(model)
    questions = [
        task.question for task in load_tasks(TaskSettings(name="gsm8k", path=gsm8k), 0).train.take(4096)
    ]
    found: list[Prompt] = []
    start = 0
    while len(found) < count:
        words = " ".join(questions[start : start + 2 + length // 20]).split()
        if not words or start >= len(questions):
            raise ValueError(
                f"{len(found)} prompts of {length} tokens found, expected {count}: give more data"
            )
        start += 1
        for end in range(1, len(words) + 1):
            message = "Think step by step, in many words. " + " ".join(words[:end])
            size = len(renderer.prompt([Message("user", message)]))
            if size == length:
                found.append([{"role": "user", "content": message}])
            if size >= length:
                break
    return found


def write(path: Path, prompts: Sequence[Prompt]) -> Path:
    """One JSON object a line, as `instep grpo` reads its own tasks."""
    records: list[dict[str, Any]] = [
        {"id": f"prompt-{i}", "messages": prompt, "answer": ""} for i, prompt in enumerate(prompts)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
