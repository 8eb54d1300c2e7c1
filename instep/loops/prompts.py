"""What must hold of a model's prompts, checked before its weights load."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from instep import models
from instep.errors import InputError
from instep.rendering.template import Renderer
from instep.rendering.tokenizer import load_tokenizer
from instep.tasks import Tags, Task, check_tags_closed


def prompt_renderer(folder: Path, include_reasoning: bool = False) -> Renderer:
    """The renderer of a model folder, whose stop tokens are those of the template and the tokenizer and those
    that config.json and generation_config.json name."""
    renderer = Renderer(load_tokenizer(folder), include_reasoning)
    found = list(renderer.stop_tokens)
    for name in ("config.json", "generation_config.json"):
        ids = _read(folder / name).get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    renderer.stop_tokens = tuple(dict.fromkeys(int(token) for token in found))
    return renderer


def check_prompts(
    tasks: Iterable[Task], renderer: Renderer, folder: Path, max_new_tokens: int, tags: Tags
) -> None:
    """Raises InputError where a prompt and its completion would not fit the model's context, where the chat
    template opens a tag that the completion is to open, or where nothing would ever end a completion."""
    if not renderer.stop_tokens:
        raise InputError(
            f"model {folder} has no stop token (its tokenizer, config.json and generation_config.json name no "
            "eos token): its completions would never end"
        )
    context = models.context_length(models.decoder_config(folder))
    for task in tasks:
        prompt = renderer.prompt(task.messages, task.tools)
        if len(prompt) + max_new_tokens > context:
            raise InputError(
                f"task {task.id}: its prompt of {len(prompt)} tokens and max_new_tokens = {max_new_tokens} do not "
                f"fit the model's context of {context}: lower max_new_tokens or leave the task out"
            )
        text = renderer.tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        check_tags_closed(text, tags, f"task {task.id}, as the chat template of {folder} writes it")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
