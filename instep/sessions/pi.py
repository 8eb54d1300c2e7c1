"""Sessions of the pi coding agent: `~/.pi/agent/sessions/--<cwd>--/*.jsonl`.

A header `{"type": "session", "version": …}`, then entries: version 1 is linear, versions 2 and 3 form a tree by
`id` and `parentId` whose current position is the last entry of the file. Format: packages/coding-agent/docs/
session.md of badlogic/pi-mono.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.records import Conversation, Message, StopReason, ToolCall
from instep.sessions.lines import Record
from instep.sessions.report import ReadReport
from instep.sessions.turns import (
    as_context,
    finish,
    join_text,
    main_model,
    string,
    text_of,
    tool_call,
    tree_path,
)

_OUTSIDE_CONTEXT = {
    "model_change",
    "thinking_level_change",
    "custom",
    "label",
    "session_info",
    "context_transform",
    "ephemeral",
}
_ENTRIES = _OUTSIDE_CONTEXT | {"message", "custom_message", "compaction", "branch_summary"}
_STOP = {
    "stop": StopReason.END_OF_TURN,
    "length": StopReason.LENGTH,
    "toolUse": StopReason.TOOL_CALL,
    "error": StopReason.ERROR,
    "aborted": StopReason.ABORTED,
}


def locations() -> list[Path]:
    """Where pi keeps its sessions."""
    agent = os.environ.get("PI_CODING_AGENT_DIR")
    return [(Path(agent) if agent else Path.home() / ".pi" / "agent") / "sessions"]


def recognise(value: dict[str, Any]) -> bool:
    kind, message = string(value, "type"), value.get("message")
    if kind == "session":
        return "cwd" in value or "version" in value
    if kind == "message":
        return isinstance(message, dict) and isinstance(message.get("role"), str)
    return kind in _ENTRIES and ("parentId" in value or "modelId" in value or "thinkingLevel" in value)


def read(records: Sequence[Record], file: Path, report: ReadReport) -> list[Conversation]:
    """One conversation for each context the model had: compaction ends one and starts the next.

    What was said before a compaction is supervised with the history it was said in; the entries kept after it
    stand in the next conversation as context. Only the active branch is read.
    """
    sessions: list[list[Record]] = [[]]
    for record in records:
        if record.value.get("type") == "session" and sessions[-1]:
            sessions.append([])
        sessions[-1].append(record)
    return [
        conversation
        for session in sessions
        if session
        for conversation in _read_session(session, file, report)
    ]


def _read_session(records: Sequence[Record], file: Path, report: ReadReport) -> list[Conversation]:
    values = [record.value for record in records]
    header = values[0] if values[0].get("type") == "session" else {}
    entries: list[dict[str, Any]] = []
    for value in values[1 if header else 0 :]:
        kind = string(value, "type")
        if kind in _ENTRIES:
            entries.append(value)
        else:
            # Still a link of the tree: what follows may name it as its parent.
            report.quarantined[f"unknown record type {kind!r}"] += 1
            if isinstance(value.get("id"), str):
                entries.append(value)
        if kind in _OUTSIDE_CONTEXT:
            report.ignored[str(kind)] += 1
    path, notes = _active_branch(entries, report)
    session = string(header, "id") or file.stem
    stamps = [value["timestamp"] for value in values if isinstance(value.get("timestamp"), str)]
    source = {
        "format": "pi",
        "file": str(file),
        "session": session,
        "project": string(header, "cwd"),
        "started": min(stamps, default=None),
        "model": main_model(_models(path)) or string(header, "modelId"),
    }
    conversations = []
    for part, messages in enumerate(_contexts(path, values, report)):
        id = session if part == 0 else f"{session}/{part + 1}"
        conversations.append(finish(messages, id=id, source=source, report=report, notes=notes))
    return conversations


def _models(path: Sequence[dict[str, Any]]) -> list[Any]:
    messages = [entry.get("message") for entry in path]
    return [
        m.get("model") for m in messages if isinstance(m, dict) and m.get("stopReason") in ("stop", "toolUse")
    ]


def _active_branch(
    entries: list[dict[str, Any]], report: ReadReport
) -> tuple[list[dict[str, Any]], list[str]]:
    by_id = {id: entry for entry in entries if (id := string(entry, "id"))}
    if not any(string(entry, "parentId") in by_id for entry in entries):
        return entries, []
    parents = {id: string(entry, "parentId") for id, entry in by_id.items()}
    order = list(by_id)
    ids, bridged = tree_path(order, parents, order[-1])
    on_path = set(ids)
    for id, entry in by_id.items():
        message = entry.get("message")
        if id not in on_path and isinstance(message, dict) and message.get("role") == "assistant":
            report.not_supervised["abandoned branch"] += 1
    notes = [f"{len(bridged)} broken links to a parent entry bridged"] if bridged else []
    return [by_id[id] for id in ids], notes


def _contexts(
    path: Sequence[dict[str, Any]], values: Sequence[dict[str, Any]], report: ReadReport
) -> list[list[Message]]:
    """The messages the model had, one list for each stretch between compactions."""
    contexts: list[list[Message]] = [[]]
    read: list[tuple[dict[str, Any], Message | None]] = []
    for entry in path:
        if entry.get("type") == "compaction":
            first = entry.get("firstKeptEntryId")
            if first is None and isinstance(entry.get("firstKeptEntryIndex"), int):
                index = entry["firstKeptEntryIndex"]  # version 1: an index into the file's records
                kept_from = values[index] if 0 <= index < len(values) else None
                start = next((i for i, (other, _) in enumerate(read) if other is kept_from), len(read))
            else:
                start = next((i for i, (other, _) in enumerate(read) if other.get("id") == first), len(read))
            kept = as_context(message for _, message in read[start:] if message is not None)
            contexts.append([_compacted(entry), *kept])
        message = _message(entry, report)
        read.append((entry, message))
        if message is not None:
            contexts[-1].append(message)
    return contexts


def _compacted(entry: dict[str, Any]) -> Message:
    summary = entry.get("summary")
    return Message(
        "user",
        "The conversation history before this point was compacted into the following summary:\n\n"
        f"<summary>\n{summary if isinstance(summary, str) else ''}\n</summary>",
    )


def _branch(summary: Any) -> Message | None:
    if not isinstance(summary, str) or not summary:
        return None
    return Message(
        "user",
        "The following is a summary of a branch that this conversation came back from:\n\n"
        f"<summary>\n{summary}</summary>",
    )


def _message(entry: dict[str, Any], report: ReadReport) -> Message | None:
    kind = string(entry, "type")
    if kind == "custom_message":
        return Message("user", text_of(entry.get("content"), report))
    if kind == "branch_summary":
        return _branch(entry.get("summary"))
    message = entry.get("message")
    if kind != "message":
        return None
    if not isinstance(message, dict):
        report.quarantined["message entry without a message"] += 1
        return None
    role = string(message, "role")
    if role == "assistant":
        return _assistant(message, report)
    if role == "toolResult":
        return Message(
            "tool",
            text_of(message.get("content"), report),
            tool_call_id=string(message, "toolCallId"),
            name=string(message, "toolName"),
        )
    if role == "bashExecution":
        return _bash(message, report)
    if role in ("user", "custom", "hookMessage"):
        return Message("user", text_of(message.get("content"), report))
    if role == "branchSummary":
        return _branch(message.get("summary"))
    if role == "compactionSummary":
        return _compacted(message)
    report.quarantined[f"unknown message role {role!r}"] += 1
    return None


def _assistant(message: dict[str, Any], report: ReadReport) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    fine = True
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    for part in parts if isinstance(parts, list) else []:
        kind = string(part, "type") if isinstance(part, dict) else None
        if kind == "toolCall":
            call, whole = tool_call(part.get("name"), part.get("arguments"), part.get("id"), report)
            calls.append(call)
            fine = fine and whole
        elif kind == "thinking":
            thoughts.append(string(part, "thinking") or "")
        else:
            texts.append(text_of([part], report))
    if not fine:
        report.not_supervised["tool arguments are no JSON object"] += 1
    return Message(
        "assistant",
        join_text(texts),
        reasoning=join_text(thoughts),
        tool_calls=tuple(calls),
        stop=_STOP.get(str(message.get("stopReason")), StopReason.UNKNOWN),
        supervised=fine,
    )


def _bash(message: dict[str, Any], report: ReadReport) -> Message | None:
    """A command the user ran with `!`, as the model is told of it; with `!!` it is kept from the model."""
    if message.get("excludeFromContext"):
        report.ignored["bashExecution with !!"] += 1
        return None
    output = message.get("output")
    text = f"Ran `{message.get('command', '')}`\n" + (f"```\n{output}\n```" if output else "(no output)")
    if message.get("cancelled"):
        text += "\n\n(command cancelled)"
    elif message.get("exitCode"):
        text += f"\n\nCommand exited with code {message['exitCode']}"
    return Message("user", text)
