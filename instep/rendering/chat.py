"""The chat template, called in one place, always with the same answer for the same conversation."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

_FIXED_DATE = datetime.datetime(2024, 7, 26)
"""What a template that writes today's date is told, so that a run resumed tomorrow renders the same tokens."""


class Unrenderable(Exception):
    """The template raised an error on these messages."""


class ChatTemplate:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        generation: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text for these messages, with the generation prompt where `generation` is set."""
        import jinja2

        variables = {
            "date_string": _FIXED_DATE.strftime("%d %b %Y"),
            "strftime_now": _FIXED_DATE.strftime,
            **(options or {}),
        }
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Unrenderable(reason) from error

    def try_render(self, *arguments: Any, **named: Any) -> str | None:
        try:
            return self.render(*arguments, **named)
        except Unrenderable:
            return None
