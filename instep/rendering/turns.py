"""Conversations as the turns that a template is handed, each text with the message it came from.

Where a template has no place for something, it is written into the content:
- tool schemas, calls and results in Hermes tags: `<tools>` at the end of the system message,
  `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>` after the assistant's text,
  `<tool_response>\\n…\\n</tool_response>` as a tool message (a user message where the template has no tools);
- a system message before the text of the first user message, an empty line between them;
- later system messages as user messages, in every template;
- neighbours of one role as one message, an empty line between them, where roles must alternate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from instep.records import Message
from instep.rendering.dialect import Dialect, Kind
from instep.rendering.marks import Marks

JOINER = "\n\n"
NO_MESSAGE = -1


@dataclass(frozen=True)
class Part:
    """Text that came from one message (or from none: tool schemas)."""

    message: int
    text: str


@dataclass(frozen=True)
class Call:
    message: int
    name: str
    arguments: Mapping[str, Any]
    id: str


@dataclass(frozen=True)
class Turn:
    role: str
    parts: tuple[Part, ...] = ()
    reasoning: tuple[Part, ...] = ()
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def empty(self) -> bool:
        return not (any(part.text for part in self.parts) or self.reasoning or self.calls)

    @property
    def last_message(self) -> int:
        return max((part.message for part in (*self.parts, *self.reasoning, *self.calls)), default=NO_MESSAGE)


@dataclass(frozen=True)
class Owner:
    """Whose field an ordinal names."""

    turn: int
    message: int
    kind: Kind


def tool_instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a template without tools says of them, at the end of the system message."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools:\n<tools>\n{schemas}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments:\n"
        '<tool_call>\n{"name": "…", "arguments": {…}}\n</tool_call>'
    )


def inline_call(name: str, arguments: Mapping[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def inline_result(content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def shape(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], dialect: Dialect, reasoning: bool
) -> list[Turn]:
    """The turns of a conversation in the given dialect."""
    turns: list[Turn] = []
    for index, message in enumerate(messages):
        leading = all(turn.role == "system" for turn in turns)
        turn = _turn(index, message, dialect, reasoning)
        if turn.role == "system" and not leading:
            turn = replace(turn, role="user")
        if turn.role == "system" and turns:
            turns[-1] = _merged(turns[-1], turn)
        else:
            turns.append(turn)
    if tools and dialect.tools == "inline":
        said = Turn("system", (Part(NO_MESSAGE, tool_instructions(tools)),))
        if turns and turns[0].role == "system":
            turns[0] = _merged(turns[0], said)
        else:
            turns.insert(0, said)
    if not dialect.system and turns and turns[0].role == "system":
        turns = _system_into_user(turns)
    if dialect.alternate:
        turns = _alternating(turns)
    return [_trimmed(turn, dialect) for turn in turns]


def _turn(index: int, message: Message, dialect: Dialect, reasoning: bool) -> Turn:
    content = message.content
    if message.role == "assistant":
        thinking = message.reasoning.strip() if reasoning and dialect.reasoning_key else ""
        calls: tuple[Call, ...] = ()
        if dialect.tools == "inline":
            said = [content] if content else []
            content = "\n".join(
                [*said, *(inline_call(call.name, call.arguments) for call in message.tool_calls)]
            )
        else:
            calls = tuple(
                Call(index, call.name, call.arguments, _call_id(call.id or f"{index}.{number}", dialect))
                for number, call in enumerate(message.tool_calls)
            )
        return Turn("assistant", (Part(index, content),), (Part(index, thinking),) if thinking else (), calls)
    if message.role == "tool":
        if dialect.tools == "inline":
            return Turn(dialect.results, (Part(index, inline_result(content)),))
        call_id = _call_id(message.tool_call_id or f"{index}", dialect)
        return Turn("tool", (Part(index, content),), call_id=call_id, name=message.name or "")
    return Turn(message.role, (Part(index, content),))


def _call_id(text: str, dialect: Dialect) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:9] if dialect.short_ids else text


def _merged(first: Turn, second: Turn) -> Turn:
    return replace(
        first,
        parts=tuple(part for part in (*first.parts, *second.parts) if part.text) or first.parts[:1],
        reasoning=first.reasoning + second.reasoning,
        calls=first.calls + second.calls,
    )


def _system_into_user(turns: list[Turn]) -> list[Turn]:
    system, *rest = turns
    if rest and rest[0].role == "user":
        return [replace(_merged(system, rest[0]), role="user"), *rest[1:]]
    return [replace(system, role="user"), *rest]


def _alternating(turns: list[Turn]) -> list[Turn]:
    merged: list[Turn] = []
    for turn in turns:
        opened = [earlier for earlier in merged if earlier.role != "system"]
        if turn.role == "assistant" and not opened:
            merged.append(Turn("user", (Part(NO_MESSAGE, ""),)))
        if merged and merged[-1].role == turn.role and turn.role in ("user", "assistant"):
            merged[-1] = _merged(merged[-1], turn)
        else:
            merged.append(turn)
    return merged


def _trimmed(turn: Turn, dialect: Dialect) -> Turn:
    parts = tuple(Part(part.message, dialect.trim(turn.role, part.text)) for part in turn.parts)
    return replace(turn, parts=tuple(part for part in parts if part.text) or parts[:1])


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The JSON value with every string in it, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(item, change) for item in value]
    return value


def texts_of(turns: Iterable[Turn], tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every text that a template is handed."""
    found: list[str] = []

    def note(text: str) -> str:
        found.append(text)
        return text

    for turn in turns:
        found.extend(part.text for part in (*turn.parts, *turn.reasoning))
        for call in turn.calls:
            found.append(call.name)
            map_texts(call.arguments, note)
    map_texts(list(tools), note)
    return found


def dress(
    turns: Sequence[Turn], dialect: Dialect, marks: Marks, wrap: bool
) -> tuple[list[dict[str, Any]], list[Owner]]:
    """The dictionaries that the template gets, texts shielded and, with `wrap`, every field bracketed.

    `owners[ordinal]` says whose field a bracket holds.
    """
    owners: list[Owner] = []

    def field(turn: int, message: int, kind: Kind, text: str) -> str:
        shielded = marks.shield(text)
        if not wrap or not text:
            return shielded
        owners.append(Owner(turn, message, kind))
        return marks.wrap(shielded, len(owners) - 1)

    dressed: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        entry: dict[str, Any] = {"role": turn.role}
        if turn.reasoning and dialect.reasoning_key:
            thinking = (field(number, part.message, "reasoning", part.text) for part in turn.reasoning)
            entry[dialect.reasoning_key] = JOINER.join(thinking)
        entry["content"] = JOINER.join(
            field(number, part.message, "content", part.text) for part in turn.parts
        )
        if turn.calls:
            entry["tool_calls"] = [
                _dressed_call(call, field(number, call.message, "call", call.name), dialect, marks)
                for call in turn.calls
            ]
        if turn.role == "tool":
            if turn.call_id:
                entry["tool_call_id"] = marks.shield(turn.call_id)
            if turn.name:
                entry["name"] = marks.shield(turn.name)
        dressed.append(entry)
    return dressed, owners


def _dressed_call(call: Call, name: str, dialect: Dialect, marks: Marks) -> dict[str, Any]:
    arguments = map_texts(call.arguments, marks.shield)
    if dialect.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": marks.shield(call.id),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
