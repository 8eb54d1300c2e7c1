"""`instep quickstart`: sessions → conversations → fine-tuning → evaluation → a sample, on what the package ships."""

from __future__ import annotations

import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.output import emit_json

if TYPE_CHECKING:
    from instep.config import SftSettings
    from instep.records import Conversation

RECIPE = "quickstart"
SAMPLE_TOKENS = 80


def quickstart(
    run: str | None = typer.Option(None, "--run", help="Run folder; default runs/<time>-<model>."),
    minutes: float | None = typer.Option(None, "--minutes", help="Train for at most so long; default 1.8."),
    engine: str | None = typer.Option(None, "--engine", help="auto, or the engine's name."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Train on the example sessions that come with instep, and see the difference: about four minutes."""
    from instep import sessions
    from instep.cli.data import show_report
    from instep.cli.progress import ConsoleListener
    from instep.config import SftSettings
    from instep.loops.sft_run import run_sft
    from instep.models import resolve
    from instep.runs.folder import refuse_existing
    from instep.settings_file import load_settings

    began = time.perf_counter()
    data = shipped_sessions()
    flags = {
        "data.path": str(data / "train"),
        "data.validation_path": str(data / "held_out"),
        "run.folder": run,
        "max_minutes": minutes,
        "engine": engine,
    }
    settings = load_settings(SftSettings, RECIPE, flags=flags)
    if run:
        refuse_existing(Path(run))
    with ConsoleListener() as listener:
        listener.note(f"model: {settings.model.path}")
        folder = resolve(settings.model.path)
        report = sessions.build([data / "train"])[1]
        if not as_json:
            show_report(report)
        summary = run_sft(settings, listener)
        sample = None
        if summary["finished"]:
            listener.note("what the model says to a held-out request, before and after")
            sample = compare(settings, folder, Path(summary["folder"]) / "adapter", sample_request(data))
    summary |= {
        "report": report.as_dict(),
        "sample": sample,
        "next": next_commands(Path(summary["folder"])),
        "seconds": time.perf_counter() - began,
    }
    if as_json:
        emit_json(summary)
    else:
        _tell(summary)
    if not summary["finished"]:
        raise typer.Exit(130)


def shipped_sessions() -> Path:
    """Folder with `train/` and `held_out/`: sessions written for instep, in several formats."""
    return Path(str(resources.files("instep") / "quickstart_data"))


def sample_request(data: Path) -> Conversation:
    """The shortest held-out conversation, cut before the assistant's second turn: it has looked at the files."""
    from dataclasses import replace

    from instep import sessions

    conversation = min(sessions.load(data / "held_out")[0], key=lambda one: len(one.messages))
    turns = [i for i, message in enumerate(conversation.messages) if message.role == "assistant"]
    return replace(conversation, messages=conversation.messages[: turns[1]])


def compare(settings: SftSettings, folder: Path, adapter: Path, request: Conversation) -> dict[str, str]:
    """The model's greedy next turn in `request` without and with the adapter: what was asked, before, after."""
    from instep import engines
    from instep.engines.base import Sampling
    from instep.loops.run import load_trained
    from instep.rendering.template import Renderer
    from instep.rendering.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer)
    name = engines.choose(settings.engine)[0]
    engine, _ = load_trained(name, settings.model, folder, adapter, settings.seed)
    prompt = renderer.prompt(request.messages, request.tools)
    greedy = Sampling(SAMPLE_TOKENS, temperature=0.0, stop_tokens=renderer.stop_tokens)
    answers = {}
    for name, with_adapter in (("before", False), ("after", True)):
        (rollout,) = engine.generate([prompt], 1, greedy, adapter=with_adapter)[0]
        answers[name] = tokenizer.decode(rollout.tokens, skip_special_tokens=True)
    asked = next(message.content for message in request.messages if message.role == "user")
    return {"prompt": asked, **answers}


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """(command, what it does) with the paths of this run."""
    run = folder.with_name(f"{folder.name}-mine")
    return [
        (f"instep data show {shipped_sessions() / 'train'}", "what was trained, token by token"),
        ("instep data build --from claude-code -o mine.jsonl", "your own sessions (or pi, codex)"),
        (f"instep sft --data mine.jsonl --run {run}", "train on them"),
    ]


def _tell(summary: dict[str, Any]) -> None:
    from rich.console import Console

    from instep.cli.progress import duration
    from instep.cli.sft import tell_summary

    console = Console(highlight=False, soft_wrap=True)

    def say(text: str = "", style: str | None = None) -> None:
        console.print(text, markup=False, style=style)

    say()
    if sample := summary["sample"]:
        say(f"Held-out request, the files already read: {sample['prompt']}", "bold")
        say("before:", "bold")
        say(sample["before"].strip())
        say("after:", "bold")
        say(sample["after"].strip())
        say()
    tell_summary(summary)
    if summary["finished"]:
        say(f"all in {duration(summary['seconds'])}")
        say("\nNext:", "bold")
        for command, what in summary["next"]:
            say(f"  {command}   # {what}")
