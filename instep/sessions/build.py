"""The whole way from session files to conversations: read, select, infer schemas, redact, supervise once, clip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from instep.config import BuildSettings
from instep.errors import InputError
from instep.records import Conversation
from instep.sessions import formats
from instep.sessions.duplicates import HISTORY, NEAR, TURN, supervise_once
from instep.sessions.files import find_files, looks_binary, read_bytes
from instep.sessions.lines import split_records
from instep.sessions.redaction import placeholders, redact
from instep.sessions.report import ReadReport
from instep.sessions.schemas import with_schemas
from instep.sessions.selection import clip, drop, parse_date, select, without_reasoning, without_tools
from instep.sessions.store import parse_conversations, with_unique_ids

_EXPECTED = "expected session files of " + ", ".join(formats.FORMATS)


def build(
    sources: Sequence[str | Path], settings: BuildSettings | None = None
) -> tuple[list[Conversation], ReadReport]:
    """Conversations out of session files and folders, with at least one supervised turn each.

    Files that `instep data build` wrote are skipped. Raises InputError for a source that does not exist and where
    nothing usable is found.
    """
    settings = settings or BuildSettings()
    if settings.since:
        parse_date(settings.since)
    report = ReadReport()
    paths = [Path(source) for source in sources]
    conversations: list[Conversation] = []
    for file in find_files(paths):
        conversations.extend(_read_file(file, report))
    if not report.files:
        raise InputError(_nothing_read(paths, report))
    conversations = select(conversations, settings.since, settings.project, report)
    if settings.exclude_tools:
        conversations = without_tools(conversations, settings.exclude_tools, report)
    if not settings.include_reasoning:
        conversations = [without_reasoning(conversation) for conversation in conversations]
    conversations = with_schemas(conversations)
    if settings.redact:
        conversations, report.redactions = redact(conversations)
    conversations = supervise_once(conversations, report)
    if settings.max_message_chars:
        conversations = [
            clip(conversation, settings.max_message_chars, report) for conversation in conversations
        ]
    conversations = with_unique_ids(_with_something_to_supervise(conversations, report))
    report.count(conversations)
    if not conversations:
        raise InputError(_nothing_left(paths, report))
    return conversations, report


def load(path: str | Path) -> tuple[list[Conversation], ReadReport]:
    """Conversations from a file that `instep data build` wrote, or from session files and folders.

    Session files are read as `instep data build` does with its defaults, secrets redacted. Raises InputError,
    for a faulty conversations file with its line.
    """
    path = Path(path)
    found = read_if_conversations(path)
    return build([path]) if found is None else found


def read_if_conversations(path: Path) -> tuple[list[Conversation], ReadReport] | None:
    """The conversations and their report, or None where the file is no conversations file."""
    if not path.is_file():
        return None
    data, reason = read_bytes(path)
    if reason is not None or not formats.is_conversations(split_records(data).records[:1]):
        return None
    conversations = parse_conversations(data, path)
    report = ReadReport(files=1, records=len(conversations), redactions=placeholders(conversations))
    report.formats["conversations"] = 1
    report.count(conversations)
    others = report.assistant_turns - report.supervised_turns
    if others:
        report.not_supervised["not supervised in the conversations file"] = others
    return conversations, report


def _read_file(file: Path, report: ReadReport) -> list[Conversation]:
    data, reason = read_bytes(file)
    lines = split_records(data)
    name = formats.detect(lines.records)
    if reason is None and not lines.records:
        reason = "binary" if looks_binary(data[:65536]) else "not JSONL"
    elif reason is None and formats.is_conversations(lines.records):
        reason = "already a conversations file"
    elif reason is None and name is None:
        reason = "JSON lines of no known format"
    if reason is not None or name is None:
        report.skipped_files[reason or "JSON lines of no known format"] += 1
        return []
    report.files += 1
    report.formats[name] += 1
    report.records += len(lines.records)
    report.quarantined.update(lines.quarantined)
    report.repaired.update(lines.repaired)
    return formats.FORMATS[name].read(lines.records, file, report)


def _with_something_to_supervise(
    conversations: Sequence[Conversation], report: ReadReport
) -> list[Conversation]:
    kept = []
    for conversation in conversations:
        if any(message.supervised for message in conversation.messages):
            kept.append(conversation)
        elif any(note.startswith(NEAR) for note in conversation.notes):
            drop(conversation, NEAR, report)
        elif any(note.endswith((HISTORY, TURN)) for note in conversation.notes):
            drop(conversation, "all turns repeat other sessions", report)
        else:
            drop(conversation, "nothing to supervise", report)
    return kept


def _nothing_read(paths: Sequence[Path], report: ReadReport) -> str:
    places = ", ".join(str(path) for path in paths)
    skipped = ", ".join(f"{count} {reason}" for reason, count in report.skipped_files.most_common())
    found = f"skipped {skipped}" if skipped else "there are no files"
    return f"no agent session in {places}: {found}; {_EXPECTED}"


def _nothing_left(paths: Sequence[Path], report: ReadReport) -> str:
    reasons = report.dropped_conversations + report.not_supervised + report.quarantined
    listed = (
        ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(6)) or "no assistant turns"
    )
    return f"nothing left to train on in {', '.join(map(str, paths))}: {listed}; widen the selection or give more files"
