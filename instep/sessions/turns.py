"""Rules that hold for the messages of every agent format: text of parts, tool arguments, what is supervised."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from instep.records import Conversation, Message, StopReason, ToolCall
from instep.sessions.lines import decode
from instep.sessions.report import ReadReport

_TEXT_PARTS = {"text", "input_text", "output_text", "summary_text"}
_IMAGE_PARTS = {"image", "input_image", "image_url"}
_UNFINISHED = {
    StopReason.ABORTED: "aborted",
    StopReason.ERROR: "ended in an error",
    # The end-of-turn token is supervised too, and here the model never produced one.
    StopReason.LENGTH: "cut at the model's output limit",
}


def string(value: Mapping[str, Any], key: str) -> str | None:
    """The field if it holds text, else None: a file may hold anything anywhere."""
    field = value.get(key)
    return field if isinstance(field, str) else None


def join_text(texts: Iterable[str]) -> str:
    """The text parts of one message as one text."""
    return "\n\n".join(text for text in texts if text)


def text_of(content: Any, report: ReadReport) -> str:
    """Text of a message's content: a string, or parts of which images become `[image]`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, Sequence):
        return json.dumps(content, ensure_ascii=False)
    texts: list[str] = []
    for part in content:
        kind = string(part, "type") if isinstance(part, Mapping) else None
        text = string(part, "text") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and text is not None:
            texts.append(text)
        elif kind in _IMAGE_PARTS:
            texts.append("[image]")
        else:
            report.ignored[f"content part {kind or type(part).__name__}"] += 1
    return join_text(texts)


def arguments_object(value: Any) -> tuple[dict[str, Any], bool]:
    """Arguments of a tool call as an object, and whether they were one (as an object or as its JSON text).

    What is no object is kept under `input`, so that nothing is lost; such a turn must not be supervised.
    """
    if value is None or value == "":
        return {}, True
    if isinstance(value, str):
        try:
            parsed = decode(value)
        except ValueError:
            return {"input": value}, False
        return (parsed, True) if isinstance(parsed, dict) else ({"input": value}, False)
    return (dict(value), True) if isinstance(value, Mapping) else ({"input": value}, False)


def finish(
    messages: Sequence[Message],
    *,
    id: str,
    source: Mapping[str, Any],
    report: ReadReport,
    tools: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
) -> Conversation:
    """Make the conversation out of a reader's messages.

    A reader marks the assistant messages that are new here and that the model produced as supervised; those that
    were aborted, ended in an error, were cut at the output limit or are empty lose the mark and are counted.
    Calls of such turns that were never answered are taken out, as are turns with nothing left and tool results
    whose call is not in the conversation.
    """
    answered = {message.tool_call_id for message in messages if message.role == "tool"}
    kept: list[Message] = []
    calls: dict[str, str] = {}
    any_call = False
    for message in messages:
        if message.role == "assistant":
            message = _settle(message, answered, report)
            if not (message.content or message.tool_calls):
                continue
            calls.update({call.id: call.name for call in message.tool_calls if call.id})
            any_call = any_call or bool(message.tool_calls)
        elif message.role == "tool":
            if message.tool_call_id not in calls if message.tool_call_id else not any_call:
                report.removed_messages["tool result without its call"] += 1
                continue
            if message.name is None and message.tool_call_id:
                message = replace(message, name=calls[message.tool_call_id])
        elif not message.content:
            report.removed_messages[f"empty {message.role} message"] += 1
            continue
        kept.append(message)
    details = {key: value for key, value in source.items() if value not in (None, "")}
    return Conversation(id, tuple(kept), tuple(tools), details, tuple(notes))


def _settle(message: Message, answered: set[str | None], report: ReadReport) -> Message:
    reason = _UNFINISHED.get(message.stop)
    if reason is not None:
        calls = tuple(call for call in message.tool_calls if call.id in answered)
        message = replace(message, tool_calls=calls)
    elif not (message.content or message.tool_calls):
        reason = "empty"
    if reason is not None and message.supervised:
        report.not_supervised[reason] += 1
        message = replace(message, supervised=False)
    return message


def as_context(messages: Iterable[Message]) -> list[Message]:
    """The same messages, none supervised: history that is supervised elsewhere."""
    return [replace(message, supervised=False) if message.supervised else message for message in messages]


def main_model(models: Iterable[Any]) -> str | None:
    """The model that produced most turns."""
    counts = Counter(model for model in models if isinstance(model, str) and model)
    return counts.most_common(1)[0][0] if counts else None


def tool_call(name: Any, arguments: Any, id: Any, report: ReadReport) -> tuple[ToolCall, bool]:
    """A tool call, and whether its arguments were an object."""
    parsed, fine = arguments_object(arguments)
    if not fine:
        report.repaired["tool arguments that are no JSON object kept as text"] += 1
    return ToolCall(str(name or "unknown"), parsed, id if isinstance(id, str) and id else None), fine


def tree_path(
    order: Sequence[str],
    parents: Mapping[str, str | None],
    leaf: str,
    covered: Collection[str] = (),
) -> tuple[list[str], set[str]]:
    """Ids from the root (or the first one in `covered`) to `leaf`, and the ids whose parent is not in the file.

    Such a broken link (its line was quarantined) is bridged to the record before it in the file, so that one
    lost line does not lose all history before it.
    """
    before = dict(zip(order[1:], order, strict=False))
    path: list[str] = []
    bridged: set[str] = set()
    seen: set[str] = set()
    current: str | None = leaf
    while current is not None and current not in seen:
        seen.add(current)
        path.append(current)
        if current in covered:
            break
        parent = parents.get(current)
        if parent is not None and parent not in parents:
            bridged.add(current)
            parent = before.get(current)
        current = parent
    return path[::-1], bridged
