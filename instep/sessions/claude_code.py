"""Sessions of Claude Code: `~/.claude/projects/<cwd>/<uuid>.jsonl`.

Records form trees by `uuid` and `parentUuid`. A reply of the model may be spread over several records with the
same `message.id`; sidechains (sub-agents) are conversations of their own; compaction starts a new root.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from instep.records import Conversation, Message, StopReason, ToolCall
from instep.sessions.lines import Record
from instep.sessions.report import ReadReport
from instep.sessions.turns import finish, join_text, main_model, string, text_of, tool_call, tree_path

_BOOKKEEPING = {
    "summary",
    "file-history-snapshot",
    "queue-operation",
    "progress",
    "attachment",
    "custom-title",
    "ai-title",
    "last-prompt",
    "agent-name",
    "permission-mode",
    "pr-link",
    "tag",
    "mode",
}
_STOP = {
    "end_turn": StopReason.END_OF_TURN,
    "tool_use": StopReason.TOOL_CALL,
    "stop_sequence": StopReason.STOP_STRING,
    "max_tokens": StopReason.LENGTH,
}
_CAVEAT = ("Caveat: The messages below were generated", "<local-command-caveat>")
_INTERRUPTED = "[Request interrupted by user]"


def locations() -> list[Path]:
    """Where Claude Code keeps its sessions."""
    folder = os.environ.get("CLAUDE_CONFIG_DIR")
    return [(Path(folder) if folder else Path.home() / ".claude") / "projects"]


def recognise(value: dict[str, Any]) -> bool:
    kind = string(value, "type")
    if kind in ("user", "assistant"):
        return isinstance(value.get("message"), dict) and ("uuid" in value or "sessionId" in value)
    return "parentUuid" in value or "leafUuid" in value or kind in _BOOKKEEPING


@dataclass
class _Chain:
    """The main chain of the file, or the sidechains of one agent: uuid → record, in file order."""

    name: str
    records: dict[str, dict[str, Any]] = field(default_factory=dict)


def read(records: Sequence[Record], file: Path, report: ReadReport) -> list[Conversation]:
    """One conversation for each context the model had: the active branch of every root, and every sidechain.

    Meta records that tell the model something (a slash command's text, a skill) are context like any other; the
    caveat before local commands, summaries (titles), system lines and snapshots are left out.
    """
    chains = _chains(records, report)
    conversations: list[Conversation] = []
    for chain in chains.values():
        elsewhere = {uuid for other in chains.values() if other is not chain for uuid in other.records}
        parts: dict[str, int] = defaultdict(int)
        for path, notes in _paths(chain, elsewhere, report):
            source = _source(path, file, sidechain=bool(chain.name))
            base = f"{source['session']}/{chain.name}" if chain.name else source["session"]
            for stretch in _stretches(path):
                messages = _messages(stretch, chain, report)
                parts[base] += 1
                id = base if parts[base] == 1 else f"{base}/{parts[base]}"
                conversations.append(finish(messages, id=id, source=source, report=report, notes=notes))
    return conversations


def _source(path: Sequence[dict[str, Any]], file: Path, sidechain: bool) -> dict[str, Any]:
    def first(key: str) -> str | None:
        return next((value for record in path if (value := string(record, key))), None)

    models = [m.get("model") for record in path if isinstance(m := record.get("message"), dict)]
    return {
        "format": "claude-code",
        "file": str(file),
        "session": first("sessionId") or file.stem,
        "project": first("cwd"),
        "started": first("timestamp"),
        "model": main_model(model for model in models if model != "<synthetic>"),
        "sidechain": sidechain or None,
    }


def _chains(records: Sequence[Record], report: ReadReport) -> dict[str, _Chain]:
    chains: dict[str, _Chain] = {"": _Chain("")}
    previous: dict[str, str] = {}
    for record in records:
        value = record.value
        kind = string(value, "type")
        if kind not in ("user", "assistant", "system") and kind not in _BOOKKEEPING:
            report.quarantined[f"unknown record type {kind!r}"] += 1
        elif kind not in ("user", "assistant"):
            report.ignored[str(kind)] += 1
        agent = string(value, "agentId")
        name = "" if value.get("isSidechain") is not True else f"sidechain-{agent}" if agent else "sidechain"
        uuid = string(value, "uuid")
        if uuid is None:
            if kind not in ("user", "assistant"):
                continue
            uuid = f"line {record.line}"  # oldest files: no tree, one record after the other
            value = {**value, "parentUuid": previous.get(name)}
        chain = chains.setdefault(name, _Chain(name))
        if uuid in chain.records:
            report.ignored["record repeated in its file"] += 1
            continue
        chain.records[uuid] = value
        previous[name] = uuid
    return chains


def _paths(
    chain: _Chain, elsewhere: set[str], report: ReadReport
) -> list[tuple[list[dict[str, Any]], list[str]]]:
    """The active branch of every tree of the chain, oldest first, with a note where links were bridged.

    The active branch ends in the newest user or assistant record: progress and system records may hang anywhere.
    """
    order = list(chain.records)
    parents: dict[str, str | None] = {}
    for uuid, record in chain.records.items():
        parent = string(record, "parentUuid")
        # A sidechain's root may name the main chain's record that started it, and the first record of a resumed
        # session one of another file: both are roots here.
        foreign = parent is not None and parent not in chain.records
        parents[uuid] = None if foreign and (parent in elsewhere or not parents) else parent
    if not any(parents.values()):  # no links at all: one record after the other
        parents = dict(zip(order, [None, *order], strict=False))
    paths: list[tuple[list[dict[str, Any]], list[str]]] = []
    covered: set[str] = set()
    for uuid in reversed(order):
        if uuid in covered or chain.records[uuid].get("type") not in ("user", "assistant"):
            continue
        ids, bridged = tree_path(order, parents, uuid, covered)
        joins_a_newer_branch = ids[0] in covered
        covered.update(ids)
        if joins_a_newer_branch:
            continue
        notes = [f"{len(bridged)} broken links to a parent record bridged"] if bridged else []
        paths.append(([chain.records[id] for id in ids], notes))
    _count_abandoned(chain, paths, report)
    return paths[::-1]


def _message_id(record: dict[str, Any]) -> str | None:
    message = record.get("message")
    return string(message, "id") if isinstance(message, dict) else None


def _count_abandoned(
    chain: _Chain, paths: Iterable[tuple[list[dict[str, Any]], list[str]]], report: ReadReport
) -> None:
    on_path = [record for path, _ in paths for record in path]
    taken = {id(record) for record in on_path}
    replies = {_message_id(record) for record in on_path if record.get("type") == "assistant"}
    lost: set[str] = set()
    for uuid, record in chain.records.items():
        reply = _message_id(record)
        if (
            record.get("type") == "assistant"
            and id(record) not in taken
            and (reply is None or reply not in replies)
        ):
            lost.add(reply or uuid)
    if lost:
        report.not_supervised["abandoned branch"] += len(lost)


def _stretches(path: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split where a compaction summary replaces what came before."""
    stretches: list[list[dict[str, Any]]] = [[]]
    for record in path:
        if record.get("isCompactSummary") is True and stretches[-1]:
            stretches.append([])
        stretches[-1].append(record)
    return [s for s in stretches if any(r.get("type") in ("user", "assistant") for r in s)]


def _messages(path: Sequence[dict[str, Any]], chain: _Chain, report: ReadReport) -> list[Message]:
    replies: dict[str, list[dict[str, Any]]] = defaultdict(list)
    results: dict[str, Message] = {}
    for record in chain.records.values():
        if record.get("type") == "assistant" and (reply := _message_id(record)):
            replies[reply].append(record)
        for result in _tool_results(record, report=ReadReport()):
            results.setdefault(result.tool_call_id or "", result)
    messages: list[Message] = []
    done: set[str] = set()
    placed: set[str] = set()
    waiting: list[str] = []
    for record in path:
        kind = record.get("type")
        if kind == "assistant":
            reply = _message_id(record)
            if reply in done:
                continue
            # Parallel calls fork the tree: a reply's other records, and the results that answer its calls, can
            # lie beside the path.
            message = _assistant(replies[reply] if reply else [record], report)
            done.update([reply] if reply else [])
            messages.extend(_missing(waiting, placed, results))
            waiting = [call.id for call in message.tool_calls if call.id]
            messages.append(message)
        elif kind == "user":
            for result in _tool_results(record, report):
                if result.tool_call_id not in placed:
                    messages.append(result)
                    placed.add(result.tool_call_id or "")
            said = _said(record, report)
            if said is not None:
                messages.extend(_missing(waiting, placed, results))
                waiting = []
                if said.content.startswith(_INTERRUPTED):
                    _interrupt(messages)
                messages.append(said)
    messages.extend(_missing(waiting, placed, results))
    return _in_call_order(messages)


def _in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Results of parallel calls in the order of the calls, whatever order they came in."""
    rank: dict[str | None, int] = {}
    turn = 0
    keyed: list[tuple[tuple[int, int], Message]] = []
    for position, message in enumerate(messages):
        if message.role != "tool":
            turn = position
            rank = {call.id: index for index, call in enumerate(message.tool_calls)}
            keyed.append(((turn, -1), message))
        else:
            keyed.append(((turn, rank.get(message.tool_call_id, len(rank))), message))
    return [message for _, message in sorted(keyed, key=lambda pair: pair[0])]


def _missing(waiting: Sequence[str], placed: set[str], results: dict[str, Message]) -> list[Message]:
    found = [results[call] for call in waiting if call in results and call not in placed]
    placed.update(call for call in waiting if call in results)
    return found


def _interrupt(messages: list[Message]) -> None:
    """The user stopped the model while it was writing: its last turn is not whole."""
    if messages and messages[-1].role == "assistant":
        messages[-1] = replace(messages[-1], stop=StopReason.ABORTED)


def _content(record: dict[str, Any]) -> Any:
    message = record.get("message")
    return message.get("content") if isinstance(message, dict) else None


def _tool_results(record: dict[str, Any], report: ReadReport) -> list[Message]:
    content = _content(record) if record.get("type") == "user" else None
    return [
        Message("tool", text_of(part.get("content"), report), tool_call_id=string(part, "tool_use_id"))
        for part in (content if isinstance(content, list) else [])
        if isinstance(part, dict) and part.get("type") == "tool_result"
    ]


def _said(record: dict[str, Any], report: ReadReport) -> Message | None:
    """What a user record says beside tool results."""
    content = _content(record)
    if isinstance(content, list):
        content = [p for p in content if not (isinstance(p, dict) and p.get("type") == "tool_result")]
    text = text_of(content, report)
    if record.get("isMeta") is True and text.startswith(_CAVEAT):
        report.ignored["meta: caveat before local commands"] += 1
        return None
    return Message("user", text) if text else None


def _assistant(records: Sequence[dict[str, Any]], report: ReadReport) -> Message:
    """One reply out of its records; a part that several records repeat is taken once."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    fine = True
    stop = StopReason.UNKNOWN
    for record in records:
        found = record.get("message")
        message: dict[str, Any] = found if isinstance(found, dict) else {}
        stop = _STOP.get(string(message, "stop_reason") or "", stop)
        if record.get("isApiErrorMessage") is True or message.get("model") == "<synthetic>":
            # Written by the program, in the model's place; the model is not told of it.
            return Message("assistant", stop=StopReason.ERROR, supervised=True)
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            if part is None:
                continue
            kind = string(part, "type") if isinstance(part, dict) else None
            if isinstance(part, dict) and kind == "tool_use":
                call, whole = tool_call(part.get("name"), part.get("input"), part.get("id"), report)
                if call not in calls:
                    calls.append(call)
                    fine = fine and whole
            elif isinstance(part, dict) and kind in ("thinking", "redacted_thinking"):
                thought = string(part, "thinking") or ""
                thoughts.extend([thought] if thought not in thoughts else [])
            else:
                text = text_of([part], report)
                texts.extend([text] if text not in texts else [])
    if not fine:
        report.not_supervised["tool arguments are no JSON object"] += 1
    return Message(
        "assistant",
        join_text(texts),
        reasoning=join_text(thoughts),
        tool_calls=tuple(calls),
        stop=stop,
        supervised=fine,
    )
