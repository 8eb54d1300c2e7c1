"""The formats that can be read, and which one a file has: found by its content, never by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from instep.errors import InputError
from instep.records import Conversation
from instep.sessions import chat, claude_code, codex, pi, prompt_completion, store
from instep.sessions.lines import Record
from instep.sessions.report import ReadReport

_SAMPLE = 200
"""Records looked at to tell a format."""


@dataclass(frozen=True)
class Format:
    recognise: Callable[[dict[str, Any]], bool]
    """Whether a record is one of this format."""
    read: Callable[[Sequence[Record], Path, ReadReport], list[Conversation]]
    locations: Callable[[], list[Path]] | None = None
    """Where the agent keeps its sessions, if it has such a place."""


FORMATS: dict[str, Format] = {
    "pi": Format(pi.recognise, pi.read, pi.locations),
    "claude-code": Format(claude_code.recognise, claude_code.read, claude_code.locations),
    "codex": Format(codex.recognise, codex.read, codex.locations),
    "chat": Format(chat.recognise, chat.read),
    prompt_completion.FORMAT: Format(prompt_completion.recognise, prompt_completion.read),
}


def detect(records: Sequence[Record]) -> str | None:
    """The format that most of the first records have; None where no record is of a known one."""
    votes = Counter(
        name
        for record in records[:_SAMPLE]
        for name, format in FORMATS.items()
        if format.recognise(record.value)
    )
    return votes.most_common(1)[0][0] if votes else None


def is_conversations(records: Sequence[Record]) -> bool:
    """Whether the file is one that `instep data build` wrote; its first record tells."""
    return bool(records) and store.recognise(records[0].value)


def default_locations(name: str) -> list[Path]:
    """The folders in which an agent keeps its sessions, those that exist. Raises InputError where none does."""
    known = {key: format.locations for key, format in FORMATS.items() if format.locations}
    if name not in known:
        raise InputError(f"unknown agent {name!r}: known are {', '.join(known)}; give other files as SRC")
    places = known[name]()
    found = [place for place in places if place.is_dir()]
    if not found:
        looked = " or ".join(str(place) for place in places)
        raise InputError(f"no {name} sessions found: {looked} is no folder; give the folder as SRC")
    return found
