"""`instep data show`: a conversation as the model will see it, tokens coloured by loss weight."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.output import emit_json
from instep.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from instep.records import Conversation
    from instep.rendering.template import Rendered, Renderer
    from instep.rendering.view import Run, Sheet


def show(
    file: Path = typer.Argument(..., metavar="FILE", help="Conversations, or a session file."),
    index: int | None = typer.Option(None, "--index", min=0, help="Which conversation, from 0 (default: 0)."),
    identifier: str | None = typer.Option(
        None, "--id", help="The conversation of this id, or its beginning."
    ),
    model: str | None = typer.Option(
        None, "--model", help="Folder or Hub id whose chat template is used (default: as in instep sft)."
    ),
    html: Path | None = typer.Option(None, "--html", help="Write a page to this file instead."),
    windows: bool = typer.Option(False, "--windows", help="Show the windows that are trained, one by one."),
    max_length: int = typer.Option(
        0, "--max-length", min=0, help="Longest window in tokens; 0: chosen as sft would."
    ),
    min_context: int | None = typer.Option(
        None, "--min-context", min=0, help="Context before a window's first trained token."
    ),
    include_reasoning: bool = typer.Option(
        False, "--include-reasoning", help="Render and train the model's thinking."
    ),
    force: bool = typer.Option(False, "--force", help="Replace the page if it exists."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Print a conversation as the model will see it, with what it is trained on marked."""
    if html is not None:
        from instep.files import refuse_output

        refuse_output(html, "--html", force, [file])
    conversation, facts = _pick(file, index, identifier)
    from instep.config import DEFAULT_MODEL
    from instep.models import resolve
    from instep.rendering.template import Renderer
    from instep.rendering.tokenizer import load_tokenizer

    model = model or DEFAULT_MODEL
    folder = resolve(model)
    renderer = Renderer(load_tokenizer(folder), include_reasoning)
    renderings = renderer.render(conversation)
    if windows or max_length or min_context is not None:
        length, reason = _window_length(folder, renderings, max_length)
        context = length // 4 if min_context is None else min_context
        facts["windows"] = f"at most {reason}; at least {context} tokens of context"
        sheets = _window_sheets(conversation, renderings, renderer, length, context)
    else:
        sheets = _rendering_sheets(conversation, renderings, renderer)
    tokens, supervised = (sum(getattr(s, name) for s in sheets) for name in ("tokens", "supervised_tokens"))
    facts |= {"model": model, "tokens": f"{tokens:,}", "trained on": f"{supervised:,} tokens"}
    facts |= {name.replace("_", " "): _said(value) for name, value in renderer.describe().items()}
    if html is not None:
        from instep.files import write_atomically
        from instep.rendering.page import page

        write_atomically(html, page(f"Conversation {conversation.id}", facts, sheets))
    if as_json:
        emit_json(
            {
                "conversation": conversation.id,
                "source": dict(conversation.source),
                "notes": list(conversation.notes),
                "model": model,
                "template": renderer.describe(),
                "tokens": tokens,
                "supervised_tokens": supervised,
                "html": None if html is None else str(html),
                "sheets": [sheet.as_dict() for sheet in sheets],
            }
        )
    elif html is not None:
        print(f"{tokens:,} tokens, {supervised:,} trained on, written to {html}")
    else:
        _print(facts, sheets)


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {what}" for key, what in value.items()) or "nothing"
    return str(value)


def _pick(file: Path, index: int | None, identifier: str | None) -> tuple[Conversation, dict[str, Any]]:
    """The conversation asked for, and facts that say which of how many it is."""
    from instep.sessions import load

    if index is not None and identifier is not None:
        raise InputError("--index and --id both given: use one")
    conversations, _ = load(file)
    if not conversations:
        raise InputError(f"{file}: no conversation in it; `instep data report {file}` says why")
    number = index or 0
    if identifier is not None:
        exact = [at for at, one in enumerate(conversations) if one.id == identifier]
        found = exact or [at for at, one in enumerate(conversations) if one.id.startswith(identifier)]
        if len(found) != 1:
            how = "no conversation has" if not found else f"{len(found)} conversations have"
            known = ", ".join(one.id for one in conversations[:5])
            raise InputError(
                f"{file}: {how} an id that begins with {identifier!r}; the first ids are: {known}"
            )
        number = found[0]
    if number >= len(conversations):
        count = len(conversations)
        raise InputError(f"{file}: --index {number}, but it holds {count} (0 to {count - 1})")
    conversation = conversations[number]
    facts = {
        "conversation": f"{conversation.id} (number {number} of {len(conversations)}, from 0)",
        "messages": f"{len(conversation.messages):,}, {sum(m.supervised for m in conversation.messages):,} trained on",
    }
    return conversation, facts


def _window_length(folder: Path, renderings: Sequence[Rendered], max_length: int) -> tuple[int, str]:
    """Window length in tokens and a phrase that says it, as `instep sft` with default settings chooses it."""
    if max_length:
        return max_length, f"{max_length:,} tokens, as asked for"
    import psutil

    from instep import models
    from instep.config import SftSettings
    from instep.plan import choose_row_length, setup_of

    config = models.decoder_config(folder)
    defaults = SftSettings()
    length, reason = choose_row_length(
        config,
        max(map(len, renderings), default=0),
        models.context_length(config),
        available_bytes=psutil.virtual_memory().available,
        rows=defaults.rows_per_batch,
        setup=setup_of(defaults),
    )
    return length, f"{length:,} tokens ({reason.partition(': ')[2]})"


def _rendering_sheets(
    conversation: Conversation, renderings: Sequence[Rendered], renderer: Renderer
) -> list[Sheet]:
    from instep.rendering.view import sheet_of_rendering

    many = len(renderings) > 1
    return [
        sheet_of_rendering(
            one,
            conversation.messages,
            renderer.tokenizer,
            f"Rendering {number} of {len(renderings)}" if many else "Conversation",
        )
        for number, one in enumerate(renderings, 1)
    ]


def _window_sheets(
    conversation: Conversation,
    renderings: Sequence[Rendered],
    renderer: Renderer,
    length: int,
    context: int,
) -> list[Sheet]:
    from instep.rendering.view import sheet_of_window
    from instep.rendering.windows import plan_windows

    planned = [(one, window) for one in renderings for window in plan_windows(one, length, context)]
    return [
        sheet_of_window(
            window,
            one,
            conversation.messages,
            renderer.tokenizer,
            f"Window {number} of {len(planned)}",
            repeats=number > 1,
        )
        for number, (one, window) in enumerate(planned, 1)
    ]


def _print(facts: dict[str, Any], sheets: Sequence[Sheet]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.is_terminal and not console.no_color
    for name, value in facts.items():
        console.print(f"{name}: {value}", markup=False, style="dim")
    legend = "green: trained on, magenta: control token" if coloured else "«trained on»"
    console.print(f"{legend}, ↵ line end, → tab, · blank at a line's end", markup=False, style="dim")
    for sheet in sheets:
        console.rule(f"{sheet.title}: {sheet.tokens:,} tokens, {sheet.supervised_tokens:,} trained on")
        for block in sheet.blocks:
            name = "template" if block.message < 0 else f"{block.message} {block.role}"
            console.print(
                f"── {name}{' (head, repeated)' if block.repeated else ''}", style="bold", markup=False
            )
            _print_runs(console, block.runs, coloured)


def _print_runs(console: Console, runs: Sequence[Run], coloured: bool) -> None:
    from rich.text import Text

    from instep.rendering.view import visible

    line = Text()
    trained = False
    for run in runs:
        if not coloured and (run.weight > 0) != trained:
            line.append("»" if trained else "«")
        trained = run.weight > 0
        style = "green" if trained else "magenta" if run.control else "dim"
        line.append(visible(run.text), f"bold {style}" if run.control and trained else style)
    if not coloured and trained:
        line.append("»")
    console.print(line, end="" if line.plain.endswith("\n") else "\n")
