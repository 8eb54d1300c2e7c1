"""Rollouts of Codex: `~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl`, also `archived_sessions`.

Lines are `{"timestamp", "type", "payload"}`; what the model saw and said are the `response_item` lines, the items
of OpenAI's Responses API. `event_msg` lines tell the same to the user interface. The oldest rollouts have the
items bare, without a payload.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instep.records import Conversation, Message, StopReason, ToolCall
from instep.sessions.lines import Record
from instep.sessions.report import ReadReport
from instep.sessions.turns import as_context, finish, join_text, main_model, string, text_of, tool_call

_LINES = {"session_meta", "turn_context", "response_item", "event_msg", "compacted"}
_OUTPUTS = {"function_call_output", "custom_tool_call_output", "local_shell_call_output"}
_CALLS = {"function_call", "custom_tool_call", "local_shell_call"}
_ITEMS = _OUTPUTS | _CALLS | {"message", "reasoning"}
# Done by the service while it answered, or Codex's own notes: no text of them reached the rollout.
_OUTSIDE_CONTEXT = {"web_search_call", "image_generation_call", "ghost_snapshot", "compaction", "other"}
_BOILERPLATE = (
    "<environment_context>",
    "<user_instructions>",
    "<permissions instructions>",
    "<collaboration_mode>",
    "<skills_instructions>",
    "# AGENTS.md instructions",
)
_SUMMARY = (
    "Another language model started to work on this task and left the following summary of it. "
    "Build on what has already been done:\n\n"
)


def locations() -> list[Path]:
    """Where Codex keeps its sessions."""
    folder = os.environ.get("CODEX_HOME")
    home = Path(folder) if folder else Path.home() / ".codex"
    return [home / "sessions", home / "archived_sessions"]


def recognise(value: dict[str, Any]) -> bool:
    kind = string(value, "type")
    if isinstance(value.get("payload"), dict):
        return kind in _LINES
    bare_header = "id" in value and "timestamp" in value and "instructions" in value
    return (
        bare_header or "record_type" in value or (kind in _ITEMS and ("call_id" in value or "role" in value))
    )


@dataclass
class _Rollout:
    """What has been read so far: `system` texts, and the messages of the context that is being built."""

    report: ReadReport
    meta: dict[str, Any] = field(default_factory=dict)
    started: str | None = None
    models: list[str] = field(default_factory=list)
    system: list[str] = field(default_factory=list)
    contexts: list[list[Message]] = field(default_factory=lambda: [[]])
    thoughts: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        return self.contexts[-1]


def read(records: Sequence[Record], file: Path, report: ReadReport) -> list[Conversation]:
    """One conversation for each context the model had: a `compacted` line ends one and starts the next.

    Instructions and the boilerplate that Codex puts before the first request become the system message.
    """
    rollout = _Rollout(report)
    for record in records:
        _read_line(record.value, rollout)
    session = string(rollout.meta, "id") or file.stem
    source = {
        "format": "codex",
        "file": str(file),
        "session": session,
        "project": string(rollout.meta, "cwd"),
        "started": string(rollout.meta, "timestamp") or rollout.started,
        "model": main_model(rollout.models),
    }
    system = [Message("system", join_text(rollout.system))] if rollout.system else []
    tools = _tools(rollout.meta)
    return [
        finish(
            [*system, *messages],
            id=session if part == 0 else f"{session}/{part + 1}",
            source=source,
            report=report,
            tools=tools,
        )
        for part, messages in enumerate(rollout.contexts)
    ]


def _tools(meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = meta.get("dynamic_tools")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": string(tool, "description") or "",
                "parameters": tool.get("inputSchema") or tool.get("input_schema") or {"type": "object"},
            },
        }
        for tool in (found if isinstance(found, list) else [])
        if isinstance(tool, dict) and string(tool, "name")
    ]


def _read_line(value: dict[str, Any], rollout: _Rollout) -> None:
    kind, payload = string(value, "type"), value.get("payload")
    rollout.started = rollout.started or string(value, "timestamp")
    if not isinstance(payload, dict):
        if kind in _ITEMS or kind in _OUTSIDE_CONTEXT:
            _read_item(value, rollout)
        elif "instructions" in value and not rollout.meta:
            _read_meta(value, rollout)
        elif "record_type" in value:
            rollout.report.ignored["record_type"] += 1
        else:
            rollout.report.quarantined[f"unknown record type {kind!r}"] += 1
    elif kind == "session_meta":
        if rollout.meta:
            rollout.report.ignored["session_meta of a forked session"] += 1
        else:
            _read_meta(payload, rollout)
    elif kind == "turn_context":
        rollout.models.extend([model] if (model := string(payload, "model")) else [])
        rollout.report.ignored["turn_context"] += 1
    elif kind == "response_item":
        _read_item(payload, rollout)
    elif kind == "compacted":
        _compact(payload, rollout)
    elif kind == "event_msg":
        _read_event(payload, rollout)
    else:
        rollout.report.quarantined[f"unknown record type {kind!r}"] += 1


def _read_meta(meta: dict[str, Any], rollout: _Rollout) -> None:
    rollout.meta = meta
    base = meta.get("base_instructions")
    for text in (string(base, "text") if isinstance(base, dict) else base, meta.get("instructions")):
        if isinstance(text, str) and text:
            rollout.system.append(text)


def _read_event(payload: dict[str, Any], rollout: _Rollout) -> None:
    """Events repeat items for the user interface; two of them change what the items mean."""
    kind = string(payload, "type")
    rollout.report.ignored["event_msg"] += 1
    if kind == "turn_aborted" and rollout.messages and rollout.messages[-1].role == "assistant":
        rollout.messages[-1] = replace(rollout.messages[-1], stop=StopReason.ABORTED)
    elif kind == "thread_rolled_back" and isinstance(turns := payload.get("num_turns"), int) and turns > 0:
        users = [i for i, message in enumerate(rollout.messages) if message.role == "user"]
        cut = users[-turns] if turns <= len(users) else 0
        lost = sum(message.supervised for message in rollout.messages[cut:])
        if lost:
            rollout.report.not_supervised["abandoned branch"] += lost
        del rollout.messages[cut:]


def _compact(payload: dict[str, Any], rollout: _Rollout) -> None:
    history = payload.get("replacement_history")
    before = rollout.messages
    rollout.contexts.append([])
    rollout.thoughts.clear()
    if isinstance(history, list):
        for item in history:
            if isinstance(item, dict):
                _read_item(item, rollout)
        rollout.contexts[-1] = as_context(rollout.messages)
    else:
        said = [message for message in before if message.role == "user"]
        summary = Message("user", _SUMMARY + (string(payload, "message") or ""))
        rollout.contexts[-1] = [*said, summary]


def _read_item(item: dict[str, Any], rollout: _Rollout) -> None:
    kind = string(item, "type")
    if kind == "message":
        _read_message(item, rollout)
    elif kind == "reasoning":
        thoughts = [text_of(item.get(key), rollout.report) for key in ("summary", "content") if item.get(key)]
        rollout.thoughts.extend(thought for thought in thoughts if thought)
    elif kind in _CALLS:
        _read_call(kind, item, rollout)
    elif kind in _OUTPUTS:
        output = item.get("output")
        if isinstance(output, dict):
            output = output.get("content") if "content" in output else output.get("output")
        text = text_of(output, rollout.report)
        rollout.messages.append(Message("tool", text, tool_call_id=string(item, "call_id")))
    elif kind in _OUTSIDE_CONTEXT:
        rollout.report.ignored[str(kind)] += 1
    else:
        rollout.report.quarantined[f"unknown response item {kind!r}"] += 1


def _read_message(item: dict[str, Any], rollout: _Rollout) -> None:
    role, text = string(item, "role"), text_of(item.get("content"), rollout.report)
    if role == "assistant":
        _extend_turn(rollout, text=text)
    elif role in ("user", "developer", "system"):
        rollout.thoughts.clear()
        leading = not any(message.role == "assistant" for message in rollout.messages)
        opening = leading and len(rollout.contexts) == 1
        boilerplate = role != "user" or text.lstrip().startswith(_BOILERPLATE)
        if opening and boilerplate and text:
            # The same instructions can stand in the header and again in the first messages.
            rollout.system.extend([text] if not any(text in known for known in rollout.system) else [])
        else:
            rollout.messages.append(Message("user", text))
    else:
        rollout.report.quarantined[f"unknown message role {role!r}"] += 1


def _read_call(kind: str, item: dict[str, Any], rollout: _Rollout) -> None:
    if kind == "function_call":
        name, arguments = item.get("name"), item.get("arguments")
    elif kind == "custom_tool_call":  # its input is free text by design
        name, arguments = item.get("name"), {"input": item.get("input")}
    else:
        action = item.get("action")
        name = "local_shell"
        arguments = {k: v for k, v in action.items() if k != "type"} if isinstance(action, dict) else {}
    id = string(item, "call_id") or string(item, "id")
    call, fine = tool_call(name, arguments, id, rollout.report)
    _extend_turn(rollout, call=call, fine=fine)


def _extend_turn(rollout: _Rollout, text: str = "", call: ToolCall | None = None, fine: bool = True) -> None:
    """Items that follow each other without a result or a user between them are one turn of the model."""
    last = rollout.messages[-1] if rollout.messages else None
    if last is None or last.role != "assistant":
        last = Message("assistant", supervised=True)
        rollout.messages.append(last)
    if not fine and last.supervised:
        rollout.report.not_supervised["tool arguments are no JSON object"] += 1
    thoughts = join_text([last.reasoning, *rollout.thoughts])
    rollout.thoughts.clear()
    calls = (*last.tool_calls, call) if call else last.tool_calls
    rollout.messages[-1] = replace(
        last,
        content=join_text([last.content, text]),
        reasoning=thoughts,
        tool_calls=calls,
        stop=StopReason.TOOL_CALL if calls else StopReason.END_OF_TURN,
        supervised=last.supervised and fine,
    )
