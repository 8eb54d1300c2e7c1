"""Rows of TRL's prompt/completion form: two strings, or two lists of messages; `tools` where a row has them.

Only the completion is supervised, as in TRL's completion-only loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.records import Conversation, Message
from instep.sessions.chat import chat_messages, row
from instep.sessions.lines import Record
from instep.sessions.report import ReadReport

FORMAT = "prompt-completion"


def recognise(value: dict[str, Any]) -> bool:
    prompt, completion = value.get("prompt"), value.get("completion")
    return isinstance(prompt, (str, list)) and isinstance(completion, (str, list))


def read(records: Sequence[Record], file: Path, report: ReadReport) -> list[Conversation]:
    """One conversation for each line. Strings become one user and one assistant message, word for word."""
    conversations = []
    for record in records:
        if not recognise(record.value):
            report.quarantined["row without prompt and completion"] += 1
            continue
        prompt = _side(record.value["prompt"], "user", report)
        completion = _side(record.value["completion"], "assistant", report)
        if prompt is not None and completion is not None:
            conversations.append(row(record, [*prompt, *completion], file, FORMAT, report))
    return conversations


def _side(value: str | list[Any], role: str, report: ReadReport) -> list[Message] | None:
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    return chat_messages(messages, report, supervised=role == "assistant")
