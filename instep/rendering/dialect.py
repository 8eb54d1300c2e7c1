"""What a chat template can render, as a record. `probes.py` finds it out; `turns.py` follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["content", "call", "reasoning"]

TRIMS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "none": lambda text: text,
        "leading newlines": lambda text: text.lstrip("\n"),
        "trailing newlines": lambda text: text.rstrip("\n"),
        "outer newlines": lambda text: text.strip("\n"),
        "leading space": lambda text: text.lstrip(),
        "trailing space": lambda text: text.rstrip(),
        "outer space": lambda text: text.strip(),
    }
)
"""White space that a template takes off a message, weakest first."""


@dataclass(frozen=True)
class Layout:
    """How the template frames one kind of assistant turn (by what comes first in it)."""

    lead: str = ""
    """Template text between the generation prompt and the turn's first field."""
    stop: str = ""
    """The end-of-turn token."""
    dropped: str = ""
    """End of the generation prompt that the template does not write before a finished turn (a thinking opener)."""


@dataclass(frozen=True)
class Dialect:
    system: bool = True
    """The template has a place for a system message; without one it is put before the first user message."""
    tools: Literal["native", "inline"] = "native"
    """Who writes tool schemas, calls and results: the template, or `turns.py` into the content."""
    results: Literal["tool", "user"] = "tool"
    """Role under which a tool result is shown."""
    alternate: bool = False
    """The template wants user and assistant to alternate: neighbours of one role are merged."""
    short_ids: bool = False
    """Tool-call ids must be nine letters and digits."""
    arguments_as_text: bool = False
    """The template joins arguments as JSON text; it is handed them so, and still shows an object."""
    trims: Mapping[str, str] = field(default_factory=dict)
    """Role → name in TRIMS of the white space that the template takes off."""
    reasoning_key: str | None = None
    """Message key under which the template shows the model's thinking."""
    plain_options: Mapping[str, Any] = field(default_factory=dict)
    """Template variables for turns without thinking."""
    reasoning_options: Mapping[str, Any] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """Kind → Layout."""

    def trim(self, role: str, text: str) -> str:
        return TRIMS[self.trims.get(role, "none")](text)

    def layout(self, kind: str) -> Layout:
        return self.layouts.get(kind) or self.layouts["content"]
