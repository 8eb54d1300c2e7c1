"""What of the sessions is kept: by date, project and tool; reasoning; and the clipping of very long messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from instep.errors import InputError
from instep.records import Conversation, Message, ToolCall
from instep.sessions.report import ReadReport


def parse_date(text: str) -> datetime:
    """A date or time in ISO form; without a zone it is UTC. Raises InputError."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise InputError(
            f"{text!r} is no date: give it as 2026-01-31 or 2026-01-31T12:00:00+01:00"
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _started(conversation: Conversation) -> datetime | None:
    """When the session started; where it does not tell, when its file was last changed."""
    try:
        return parse_date(str(conversation.source.get("started", "")))
    except InputError:
        file = Path(str(conversation.source.get("file", "")))
        return datetime.fromtimestamp(file.stat().st_mtime, UTC) if file.is_file() else None


def select(
    conversations: Sequence[Conversation], since: str | None, project: str | None, report: ReadReport
) -> list[Conversation]:
    """Keep sessions that started at `since` or later and whose project path holds `project` (their file's path where
    they name none)."""
    earliest = parse_date(since) if since else None
    kept = []
    for conversation in conversations:
        started = _started(conversation) if earliest else None
        place = str(conversation.source.get("project") or conversation.source.get("file", ""))
        if earliest and (started is None or started < earliest):
            drop(conversation, "started before --since", report)
        elif project and project.casefold() not in place.casefold():
            drop(conversation, "other project", report)
        else:
            kept.append(conversation)
    return kept


def drop(conversation: Conversation, reason: str, report: ReadReport) -> None:
    """Count a conversation as dropped, and its turns that would have been supervised."""
    report.dropped_conversations[reason] += 1
    turns = sum(message.supervised for message in conversation.messages)
    if turns:
        report.not_supervised[reason] += turns


def without_tools(
    conversations: Sequence[Conversation], names: Sequence[str], report: ReadReport
) -> list[Conversation]:
    """Remove all calls of the named tools, their results and their schemas.

    An assistant turn with nothing left is removed. One with something left stays as context but is not
    supervised: what is left is not what the model said, and it did not end there.
    """
    excluded = frozenset(names)
    called = {call.name for c in conversations for message in c.messages for call in message.tool_calls}
    for name in sorted(excluded - called):
        report.notes.append(f"--exclude-tool {name}: no session calls a tool of that name")
    return [_without_tools(conversation, excluded, report) for conversation in conversations]


def _without_tools(conversation: Conversation, excluded: frozenset[str], report: ReadReport) -> Conversation:
    messages: list[Message] = []
    gone: set[str | None] = set()
    for message in conversation.messages:
        calls = tuple(call for call in message.tool_calls if call.name not in excluded)
        if len(calls) < len(message.tool_calls):
            gone.update(call.id for call in message.tool_calls if call.id and call.name in excluded)
            if message.supervised:
                report.not_supervised["tool excluded"] += 1
            if not (calls or message.content):
                continue
            message = replace(message, tool_calls=calls, supervised=False)
        elif message.role == "tool" and (message.tool_call_id in gone or message.name in excluded):
            report.removed_messages["result of an excluded tool"] += 1
            continue
        messages.append(message)
    tools = tuple(tool for tool in conversation.tools if tool["function"]["name"] not in excluded)
    return replace(conversation, messages=tuple(messages), tools=tools)


def without_reasoning(conversation: Conversation) -> Conversation:
    messages = tuple(replace(m, reasoning="") if m.reasoning else m for m in conversation.messages)
    return replace(conversation, messages=messages)


def clip(conversation: Conversation, limit: int, report: ReadReport) -> Conversation:
    """Cut the middle out of every text longer than `limit` characters, with a mark that says how much.

    An assistant message that was clipped is not supervised. Limits hold for content, reasoning and every text
    inside the arguments of a call, each on its own.
    """
    messages: list[Message] = []
    for message in conversation.messages:
        clipped = replace(
            message,
            content=clip_text(message.content, limit),
            reasoning=clip_text(message.reasoning, limit),
            tool_calls=tuple(
                ToolCall(call.name, clip_value(call.arguments, limit), call.id) for call in message.tool_calls
            ),
        )
        if clipped != message:
            report.repaired[f"{message.role} message clipped"] += 1
            if message.supervised:
                report.not_supervised["clipped"] += 1
                clipped = replace(clipped, supervised=False)
        messages.append(clipped)
    return replace(conversation, messages=tuple(messages))


def clip_text(text: str, limit: int) -> str:
    """Head and tail of a long text, `limit` characters of it in all, around a mark with the number cut."""
    if len(text) <= limit:
        return text
    head = (limit + 1) // 2
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit:,} characters cut …]\n{text[len(text) - tail :]}"


def clip_value(value: Any, limit: int) -> Any:
    """The same for every text inside a JSON value."""
    if isinstance(value, str):
        return clip_text(value, limit)
    if isinstance(value, Mapping):
        return {key: clip_value(item, limit) for key, item in value.items()}
    if isinstance(value, list):
        return [clip_value(item, limit) for item in value]
    return value
