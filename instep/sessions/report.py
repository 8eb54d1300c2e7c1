"""What was read, what was kept, and what was left out and why: one object that all stages add to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from instep.records import Conversation, Message


@dataclass
class ReadReport:
    """Counts, each by reason or kind. Every assistant turn that was read is either among `supervised_turns` or
    counted once in `not_supervised`."""

    files: int = 0
    """Files that were read as sessions."""
    formats: Counter[str] = field(default_factory=Counter)
    """Format → files."""
    skipped_files: Counter[str] = field(default_factory=Counter)
    """Reason → files that are no sessions."""
    records: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    """Reason → lines or records that could not be used."""
    repaired: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    """Record or part type → how many were left out because they are not part of what the model saw."""
    conversations: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    """Role → messages of the conversations kept."""
    assistant_turns: int = 0
    supervised_turns: int = 0
    supervised_characters: int = 0
    supervised_tokens: int | None = None
    """Only known with a tokenizer."""
    tokens: int | None = None
    """All tokens as rendered, only known with a tokenizer."""
    not_supervised: Counter[str] = field(default_factory=Counter)
    """Reason → assistant turns that the loss is not taken on."""
    removed_messages: Counter[str] = field(default_factory=Counter)
    """Reason → other messages that were removed."""
    dropped_conversations: Counter[str] = field(default_factory=Counter)
    redactions: Counter[str] = field(default_factory=Counter)
    """Kind → replacements."""
    notes: list[str] = field(default_factory=list)

    def count(self, conversations: Iterable[Conversation]) -> None:
        """Set the tallies of what is kept: conversations, messages by role, turns, characters."""
        self.conversations = self.assistant_turns = self.supervised_turns = self.supervised_characters = 0
        self.messages = Counter()
        for conversation in conversations:
            self.conversations += 1
            for message in conversation.messages:
                self.messages[message.role] += 1
                self.assistant_turns += message.role == "assistant"
                if message.supervised:
                    self.supervised_turns += 1
                    self.supervised_characters += produced_characters(message)

    def add(self, other: ReadReport) -> None:
        """Add another report's counts of what was read and left out (what is kept is set by `count`)."""
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, list):
                mine.extend(theirs)
            elif theirs is not None:
                setattr(self, entry.name, (mine or 0) + theirs)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, counters with the largest count first."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            name: dict(value.most_common()) if isinstance(value, Counter) else value
            for name, value in values.items()
        }


def produced_characters(message: Message) -> int:
    """Characters that the assistant produced in this message: text, reasoning, names and arguments of calls."""
    total = len(message.content) + len(message.reasoning)
    for call in message.tool_calls:
        total += len(call.name) + _characters(call.arguments)
    return total


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _characters(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_characters(item) for item in value)
    return len(str(value))
