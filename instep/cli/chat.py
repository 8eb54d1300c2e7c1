"""`instep chat`: a conversation with a model or a run in the terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import typer

from instep.cli import generate as options


def chat(
    target: str | None = typer.Argument(
        None, metavar="[RUN|MODEL]", help="Run folder, adapter folder, model folder or Hub id."
    ),
    model: str | None = options.MODEL,
    adapter: str | None = options.ADAPTER,
    engine: str | None = options.ENGINE,
    system: str | None = options.SYSTEM,
    tools: Path | None = options.TOOLS,
    temperature: float | None = options.TEMPERATURE,
    top_p: float | None = options.TOP_P,
    top_k: int | None = options.TOP_K,
    min_p: float | None = options.MIN_P,
    seed: int | None = options.SEED,
    max_new_tokens: int | None = options.TOKENS,
    stop: list[str] = options.STOP,
    settings: list[str] = options.SETTINGS,
    stats: bool = options.STATS,
) -> None:
    """Talk with a model; /help lists the commands, Ctrl-C ends an answer."""
    from instep.chat.repl import Chat, Repl

    flags = {
        "model.path": model, "adapter": adapter, "engine": engine, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "min_p": min_p, "seed": seed, "max_new_tokens": max_new_tokens,
    }  # fmt: skip
    schemas = options.read_tools_file(tools)
    chat_model = options.open_asked(target, flags, stop, settings)
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  arrow keys and history at the prompt
        typer.echo("  /help lists the commands", err=True)
    screen = options.Screen(sys.stdout.isatty())
    Repl(
        Chat(chat_model, schemas, system),
        read=lambda prompt: input(prompt if terminal else ""),
        show=screen.show,
        note=lambda text: typer.echo(text, err=True),
        describe=options.stats_line,
        always_stats=stats,
    ).run()
