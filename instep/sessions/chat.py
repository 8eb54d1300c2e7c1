"""OpenAI-style chat JSONL: one conversation a line, `{"messages": […], "tools": […]}`.

`tool_calls[].function.arguments` is JSON text there and becomes an object here, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.records import Conversation, Message, Role, StopReason, ToolCall
from instep.sessions.lines import Record, decode
from instep.sessions.report import ReadReport
from instep.sessions.turns import finish, string, text_of, tool_call

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_STOP = {
    "stop": StopReason.END_OF_TURN,
    "tool_calls": StopReason.TOOL_CALL,
    "length": StopReason.LENGTH,
}


def recognise(value: dict[str, Any]) -> bool:
    messages = value.get("messages")
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(message, dict) and "role" in message for message in messages)
    )


def read(records: Sequence[Record], file: Path, report: ReadReport) -> list[Conversation]:
    """One conversation for each line. An assistant message with `"weight": 0` is context only."""
    conversations = []
    for record in records:
        if not recognise(record.value):
            report.quarantined["row without messages"] += 1
            continue
        messages = chat_messages(record.value["messages"], report)
        if messages is not None:
            conversations.append(row(record, messages, file, "chat", report))
    return conversations


def row(
    record: Record, messages: Sequence[Message], file: Path, format: str, report: ReadReport
) -> Conversation:
    """The conversation of one line of a data set, with the id and the tools that the line gives."""
    value = record.value
    id = string(value, "id") or f"{file.stem}-{record.line}"
    source = {
        "format": format,
        "file": str(file),
        "session": id,
        "started": string(value, "timestamp") or string(value, "created_at"),
        "model": string(value, "model"),
    }
    return finish(
        messages, id=id, source=source, report=report, tools=tool_schemas(value.get("tools"), report)
    )


def tool_schemas(tools: Any, report: ReadReport) -> list[dict[str, Any]]:
    """Schemas in the OpenAI form, from that form, from bare functions, or from the JSON text of either."""
    if isinstance(tools, str) and tools:
        try:
            tools = decode(tools)
        except ValueError:
            report.quarantined["tools are not JSON"] += 1
            return []
    schemas = []
    for tool in tools if isinstance(tools, list) else []:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(function, dict) and string(function, "name"):
            schemas.append({"type": "function", "function": function})
        else:
            report.quarantined["tool schema without a name"] += 1
    return schemas


def chat_messages(values: Any, report: ReadReport, supervised: bool = True) -> list[Message] | None:
    """The messages of a row; None, with the reason counted, where one of them has no known role."""
    messages: list[Message] = []
    for value in values:
        role = _ROLES.get(string(value, "role") or "") if isinstance(value, dict) else None
        if role is None:
            report.quarantined["row with a message of unknown role"] += 1
            return None
        if role == "assistant":
            messages.append(_assistant(value, len(messages), report, supervised))
        elif role == "tool":
            id = string(value, "tool_call_id")
            name = string(value, "name")
            if id is None and name is not None:
                id = _call_by_name(messages, name)
            messages.append(
                Message("tool", text_of(value.get("content"), report), tool_call_id=id, name=name)
            )
        else:
            messages.append(Message(role, text_of(value.get("content"), report)))
    return messages


def _call_by_name(messages: Sequence[Message], name: str) -> str | None:
    """The id of the newest unanswered call of that tool: results without an id go by name and order."""
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    for message in reversed(messages):
        if message.role == "assistant":
            return next((c.id for c in message.tool_calls if c.name == name and c.id not in answered), None)
    return None


def _assistant(value: dict[str, Any], position: int, report: ReadReport, supervised: bool) -> Message:
    calls: list[ToolCall] = []
    fine = True
    found = value.get("tool_calls")
    old = value.get("function_call")
    listed: list[Any] = list(found) if isinstance(found, list) else []
    if isinstance(old, dict):
        listed.append({"function": old})
    for index, entry in enumerate(listed):
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(function, dict):
            fine = False
            continue
        id = string(entry, "id") or f"call_{position}_{index}"
        call, whole = tool_call(function.get("name"), function.get("arguments"), id, report)
        calls.append(call)
        fine = fine and whole
    weight = 1 if value.get("weight") is None else value["weight"]
    wanted = supervised and weight in (1,)
    reason = None
    if supervised and not wanted:
        reason = "weight 0 in the data" if weight in (0,) else "weight is neither 0 nor 1"
    if wanted and not fine:
        reason = "tool arguments are no JSON object"
    if reason:
        report.not_supervised[reason] += 1
    reasoning = value.get("reasoning_content") or value.get("reasoning") or value.get("thinking")
    content = value.get("content")
    return Message(
        "assistant",
        text_of(content if content is not None else value.get("refusal"), report),
        reasoning=text_of(reasoning, report),
        tool_calls=tuple(calls),
        stop=_STOP.get(string(value, "finish_reason") or "", StopReason.UNKNOWN),
        supervised=wanted and fine,
    )
