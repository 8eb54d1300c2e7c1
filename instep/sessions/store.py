"""Conversations on disk: JSONL, one object a line, UTF-8, arguments as objects, empty fields left out.

Nothing passes through a table's schema inference: what is stored is what was read. Lines end at `\\n` only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from instep.errors import InputError
from instep.files import write_atomically
from instep.records import Conversation, Message, Role, StopReason, ToolCall
from instep.sessions.lines import STRICT

_ROLES = frozenset(get_args(Role))
_STOPS = frozenset(reason.value for reason in StopReason)
_FIELDS = {"id", "source", "notes", "tools", "messages"}
_MESSAGE_FIELDS = {
    "role",
    "content",
    "reasoning",
    "tool_calls",
    "tool_call_id",
    "name",
    "stop",
    "supervised",
}
_CALL_FIELDS = {"id", "name", "arguments"}


def recognise(value: Mapping[str, Any]) -> bool:
    """Whether an object is a conversation as written here (and not a chat row of somebody else)."""
    source = value.get("source")
    return isinstance(value.get("messages"), list) and isinstance(source, Mapping) and "format" in source


def to_json(conversation: Conversation) -> dict[str, Any]:
    """The conversation as JSON values. `source.format` is always there: it marks the file as ours."""
    value: dict[str, Any] = {
        "id": conversation.id,
        "source": {"format": "instep", **conversation.source},
        "notes": list(conversation.notes),
        "tools": list(conversation.tools),
        "messages": [_message_to_json(message) for message in conversation.messages],
    }
    return {key: item for key, item in value.items() if item or key in ("id", "messages")}


def _message_to_json(message: Message) -> dict[str, Any]:
    calls = [
        {"id": call.id, "name": call.name, "arguments": call.arguments}
        if call.id
        else {"name": call.name, "arguments": call.arguments}
        for call in message.tool_calls
    ]
    value = {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "stop": None if message.stop is StopReason.UNKNOWN else message.stop.value,
        "supervised": message.supervised,
    }
    return {key: item for key, item in value.items() if item}


def from_json(value: Any, where: str) -> Conversation:
    """The conversation of one JSON object. Raises InputError, starting with `where`, for what does not fit."""
    row = _object(value, where, "a conversation", _FIELDS)
    if not isinstance(row.get("id"), str) or not row["id"]:
        raise InputError(f"{where}: `id` must be a text that is not empty")
    if not isinstance(row.get("messages"), list):
        raise InputError(f"{where}: `messages` must be a list of messages")
    source = _object(row.get("source", {}), where, "`source`")
    notes, tools = row.get("notes", []), row.get("tools", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise InputError(f"{where}: `notes` must be a list of texts")
    if not isinstance(tools, list) or not all(_is_schema(tool) for tool in tools):
        raise InputError(
            f'{where}: `tools` must be a list of {{"type": "function", "function": {{"name": …}}}}'
        )
    messages = [_message(message, f"{where}: message {i}") for i, message in enumerate(row["messages"])]
    return Conversation(row["id"], tuple(messages), tuple(tools), source, tuple(notes))


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _object(value: Any, where: str, what: str, allowed: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: {what} must be a JSON object, found {type(value).__name__}")
    unknown = set(value) - allowed if allowed is not None else set()
    if unknown:
        raise InputError(
            f"{where}: unknown field {sorted(unknown)[0]!r} in {what}; known are {', '.join(sorted(allowed or ()))}"
        )
    return value


def _message(value: Any, where: str) -> Message:
    row = _object(value, where, "a message", _MESSAGE_FIELDS)
    role = row.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InputError(f"{where}: role {role!r} is none of {', '.join(sorted(_ROLES))}")
    for name in ("content", "reasoning", "tool_call_id", "name", "stop"):
        if not isinstance(row.get(name, ""), str):
            raise InputError(f"{where}: `{name}` must be text")
    calls, supervised = row.get("tool_calls", []), row.get("supervised", False)
    if not isinstance(calls, list) or not isinstance(supervised, bool):
        raise InputError(f"{where}: `tool_calls` must be a list and `supervised` true or false")
    stop = row.get("stop", StopReason.UNKNOWN.value)
    if stop not in _STOPS:
        raise InputError(f"{where}: stop {stop!r} is none of {', '.join(sorted(_STOPS))}")
    if role != "assistant" and (supervised or calls):
        raise InputError(
            f"{where}: only assistant messages can be supervised or call tools, this is a {role} message"
        )
    return Message(
        role=role,  # type: ignore[arg-type]
        content=row.get("content", ""),
        reasoning=row.get("reasoning", ""),
        tool_calls=tuple(_call(call, f"{where}: tool call {i}") for i, call in enumerate(calls)),
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
        stop=StopReason(stop),
        supervised=supervised,
    )


def _call(value: Any, where: str) -> ToolCall:
    row = _object(value, where, "a tool call", _CALL_FIELDS)
    if not isinstance(row.get("name"), str) or not row["name"]:
        raise InputError(f"{where}: `name` must be a text that is not empty")
    if not isinstance(row.get("arguments"), dict):
        raise InputError(
            f"{where}: `arguments` must be a JSON object, found {type(row.get('arguments')).__name__} "
            "(JSON text is not decoded here: build the file with `instep data build`)"
        )
    id = row.get("id")
    if id is not None and not isinstance(id, str):
        raise InputError(f"{where}: `id` must be text")
    return ToolCall(row["name"], row["arguments"], id)


def write_conversations(path: str | Path, conversations: Iterable[Conversation]) -> None:
    """Write the file whole or not at all. Raises InputError where the disk refuses or a value is no JSON."""
    path = Path(path)
    rows: list[str] = []
    for conversation in conversations:
        try:
            rows.append(json.dumps(to_json(conversation), ensure_ascii=False, allow_nan=False) + "\n")
        except ValueError as error:
            raise InputError(f"conversation {conversation.id} cannot be written as JSON: {error}") from error
    write_atomically(path, "".join(rows))


def read_conversations(path: str | Path) -> list[Conversation]:
    """Read and check a conversations file. Raises InputError naming file and line for the first fault."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read conversations from {path}: {error.strerror or error}") from error
    return parse_conversations(data, path)


def parse_conversations(data: bytes, path: Path) -> list[Conversation]:
    """The conversations in the bytes of the file `path`."""
    conversations: list[Conversation] = []
    lines: dict[str, int] = {}
    for number, raw in enumerate(data.split(b"\n"), 1):
        if not raw.strip():
            continue
        where = f"{path}:{number}"
        try:
            value = STRICT.decode(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not one JSON object ({error})") from error
        conversation = from_json(value, where)
        if conversation.id in lines:
            raise InputError(f"{where}: id {conversation.id!r} is already on line {lines[conversation.id]}")
        lines[conversation.id] = number
        conversations.append(conversation)
    return conversations


def with_unique_ids(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Copies of one session keep its id with a number behind it."""
    taken: set[str] = set()
    result = []
    for conversation in conversations:
        id, copy = conversation.id, 1
        while id in taken:
            copy += 1
            id = f"{conversation.id}#{copy}"
        taken.add(id)
        result.append(conversation if id == conversation.id else replace(conversation, id=id))
    return result
