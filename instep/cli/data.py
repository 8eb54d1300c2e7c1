"""`instep data`: build conversations from agent sessions, and report on either."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.output import emit_json
from instep.cli.show import show
from instep.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from instep.records import Conversation
    from instep.sessions import ReadReport

app = typer.Typer(
    name="data",
    help="From agent sessions to conversations, and a look at what is trained.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


app.command("show")(show)


@app.command("build")
def build(
    sources: list[Path] = typer.Argument(
        None, metavar="SRC…", help="Session files, or folders that hold them."
    ),
    output: Path = typer.Option(..., "--output", "-o", help="Conversations file to write (JSONL)."),
    agents: list[str] = typer.Option(
        [], "--from", help="Read an agent's own folder: pi, claude-code or codex; repeatable."
    ),
    include_reasoning: bool = typer.Option(False, "--include-reasoning", help="Keep the model's thinking."),
    max_message_chars: int | None = typer.Option(
        None, "--max-message-chars", min=0, help="Cut the middle of longer texts; 0: never."
    ),
    since: str | None = typer.Option(None, "--since", help="Only sessions started on this date or later."),
    project: str | None = typer.Option(
        None, "--project", help="Only sessions whose project path holds this text."
    ),
    exclude_tools: list[str] = typer.Option(
        [],
        "--exclude-tool",
        help="Remove calls and results of this tool; repeatable.",
    ),
    no_redact: bool = typer.Option(
        False, "--no-redact", help="Leave secrets, e-mail addresses and home directories in."
    ),
    tokenizer: str | None = typer.Option(None, "--tokenizer", help="Model whose tokens the report counts."),
    force: bool = typer.Option(False, "--force", help="Replace the output file if it exists."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Write the conversations of agent sessions to one file, secrets redacted, and report what was left out."""
    from instep.config import BuildSettings
    from instep.files import refuse_output
    from instep.sessions import build as build_conversations
    from instep.sessions.formats import default_locations
    from instep.sessions.store import write_conversations

    places = [*(sources or []), *(place for agent in agents for place in default_locations(agent))]
    if not places:
        raise InputError("nothing to read: give session files or folders, or --from pi, claude-code or codex")
    given = {
        "include_reasoning": include_reasoning or None,
        "max_message_chars": max_message_chars,
        "since": since,
        "project": project,
        "exclude_tools": tuple(exclude_tools) or None,
        "redact": False if no_redact else None,
    }
    refuse_output(output, "-o", force, _sessions_among(places, output))
    # What was not given keeps the default of config.py, which is not imported for `--help`.
    settings = BuildSettings.model_validate({k: v for k, v in given.items() if v is not None})
    conversations, report = build_conversations(places, settings)
    if tokenizer:
        count_tokens(conversations, tokenizer, include_reasoning, report)
    write_conversations(output, conversations)
    if as_json:
        emit_json({**report.as_dict(), "output": str(output), "settings": settings.model_dump()})
        return
    show_report(report)
    print(f"{report.conversations:,} conversations written to {output}")


def _sessions_among(places: list[Path], output: Path) -> list[Path]:
    """The output itself where it would be read as a session: what `instep data build` wrote is not."""
    from instep.sessions.build import read_if_conversations
    from instep.sessions.files import find_files

    if not output.exists() or not any(file.samefile(output) for file in find_files(places) if file.exists()):
        return []
    return [] if read_if_conversations(output) else [output]


@app.command("report")
def report(
    sources: list[Path] = typer.Argument(
        ..., metavar="FILE-or-SRC…", help="Conversations, or session files."
    ),
    tokenizer: str | None = typer.Option(None, "--tokenizer", help="Model whose tokens are counted."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Show what conversations or session files hold, and what would be left out and why; writes nothing."""
    from instep.sessions import build as build_conversations
    from instep.sessions.build import read_if_conversations
    from instep.sessions.report import ReadReport

    merged = ReadReport()
    conversations: list[Conversation] = []
    raw: list[Path] = []
    for source in sources:
        found = read_if_conversations(source)
        if found is None:
            raw.append(source)
        else:
            conversations.extend(found[0])
            merged.add(found[1])
    if raw:
        built, read = build_conversations(raw)
        conversations.extend(built)
        merged.add(read)
    merged.count(conversations)
    if tokenizer:
        with_reasoning = any(message.reasoning for c in conversations for message in c.messages)
        count_tokens(conversations, tokenizer, with_reasoning, merged)
    if as_json:
        emit_json(merged.as_dict())
    else:
        show_report(merged)


def count_tokens(
    conversations: Sequence[Conversation], model: str, include_reasoning: bool, report: ReadReport
) -> None:
    """Set the report's tokens and supervised tokens as the model's chat template renders them."""
    from instep.models import resolve
    from instep.rendering.template import Renderer
    from instep.rendering.tokenizer import load_tokenizer

    folder = Path(model) if Path(model).is_dir() else resolve(model)
    renderer = Renderer(load_tokenizer(folder), include_reasoning)
    # Only the counts are wanted: a template that rewrites earlier turns need not repeat a whole history.
    rendered = [
        one for conversation in conversations for one in renderer.render(conversation, context_tokens=0)
    ]
    report.tokens = sum(len(one.tokens) for one in rendered)
    report.supervised_tokens = sum(int((one.weight > 0).sum()) for one in rendered)


def show_report(report: ReadReport) -> None:
    """Print the report as tables on stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_table("Read", _what_was_read(report)))
    console.print(_table("Kept", _what_is_kept(report)))
    left_out = [
        *_rows("assistant turns not supervised", report.not_supervised),
        *_rows("conversations dropped", report.dropped_conversations),
        *_rows("other messages removed", report.removed_messages),
    ]
    if left_out:
        console.print(_table("Left out, and why", left_out))
    if report.redactions:
        console.print(_table("Redacted, by kind", _rows("replacements", report.redactions)))
    for note in report.notes:
        console.print(f"note: {note}", markup=False)


def _what_was_read(report: ReadReport) -> list[tuple[str, str, Any]]:
    return [
        *_rows("files", report.formats),
        *_rows("files skipped", report.skipped_files),
        ("records", "", report.records),
        *_rows("quarantined", report.quarantined),
        *_rows("repaired", report.repaired),
        *_rows("not part of what the model saw", report.ignored),
    ]


def _what_is_kept(report: ReadReport) -> list[tuple[str, str, Any]]:
    rows: list[tuple[str, str, Any]] = [("conversations", "", report.conversations)]
    rows += _rows("messages", report.messages)
    rows += [
        ("assistant turns", "", report.assistant_turns),
        ("supervised turns", "", report.supervised_turns),
        ("supervised characters", "", report.supervised_characters),
    ]
    if report.supervised_tokens is None:
        rows.append(("supervised tokens", "", "not counted: give --tokenizer MODEL"))
    else:
        rows.append(("supervised tokens", "", report.supervised_tokens))
        rows.append(("tokens as rendered", "", report.tokens))
    return rows


def _rows(name: str, counts: Counter[str]) -> list[tuple[str, str, Any]]:
    return [(name if i == 0 else "", key, n) for i, (key, n) in enumerate(counts.most_common())]


def _table(title: str, rows: Sequence[tuple[str, str, Any]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, pad_edge=False)
    table.add_column()
    table.add_column()
    table.add_column(justify="right")
    for name, key, value in rows:
        # Text, not markup: a reason may hold brackets.
        table.add_row(Text(name), Text(key), Text(f"{value:,}" if isinstance(value, int) else str(value)))
    return table
