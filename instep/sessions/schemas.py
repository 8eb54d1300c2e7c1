"""Tool schemas for sessions that do not store them, inferred from the calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from instep.records import Conversation, ToolCall

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int: True is an int in Python
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


def with_schemas(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Give every called tool a schema: the session's own where it has one, else one inferred, with a note.

    Calls are pooled over all conversations of one session, so that its parts show the model the same tools.
    """
    calls: dict[tuple[Any, Any], dict[str, list[ToolCall]]] = {}
    for conversation in conversations:
        by_name = calls.setdefault(_session(conversation), {})
        for message in conversation.messages:
            for call in message.tool_calls:
                by_name.setdefault(call.name, []).append(call)
    result = []
    for conversation in conversations:
        known = {tool["function"]["name"] for tool in conversation.tools}
        by_name = calls[_session(conversation)]
        missing = [name for name in by_name if name not in known]
        if missing:
            schemas = [infer(name, by_name[name]) for name in missing]
            note = f"tool schemas inferred from calls: {', '.join(missing)}"
            conversation = replace(
                conversation, tools=(*conversation.tools, *schemas), notes=(*conversation.notes, note)
            )
        result.append(conversation)
    return result


def _session(conversation: Conversation) -> tuple[Any, Any]:
    return conversation.source.get("format"), conversation.source.get("session", conversation.id)


def infer(name: str, calls: Iterable[ToolCall]) -> dict[str, Any]:
    """Schema of one tool: argument names and JSON types as seen; required is what every call has."""
    types: dict[str, set[str]] = {}
    required: set[str] | None = None
    for call in calls:
        for argument, value in call.arguments.items():
            types.setdefault(argument, set()).add(_type(value))
        names = set(call.arguments)
        required = names if required is None else required & names
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {argument: _property(seen) for argument, seen in types.items()},
    }
    if required:
        parameters["required"] = [argument for argument in types if argument in required]
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def _property(seen: set[str]) -> Mapping[str, Any]:
    if seen == {"integer", "number"}:
        seen = {"number"}
    return {"type": next(iter(seen)) if len(seen) == 1 else sorted(seen)}


def _type(value: Any) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "null")
