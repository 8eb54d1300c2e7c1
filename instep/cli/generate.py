"""`instep generate`: one answer to one prompt, from a model or a run, on any engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.output import emit_json

if TYPE_CHECKING:
    from instep.chat.model import Answer, ChatModel

MODEL = typer.Option(None, "--model", help="Local folder or Hub id; default: the adapter's base model.")
ADAPTER = typer.Option(None, "--adapter", metavar="RUN", help="Run or adapter folder.")
ENGINE = typer.Option(None, "--engine", help="auto, or the engine's name.")
SYSTEM = typer.Option(None, "--system", help="System prompt.")
TOOLS = typer.Option(None, "--tools", metavar="FILE", help="JSON file with tool schemas in the OpenAI form.")
TEMPERATURE = typer.Option(None, "--temperature", help="0 takes the most likely token; default 0.7.")
TOP_P = typer.Option(None, "--top-p", help="Draw from the most likely tokens of this total probability.")
TOP_K = typer.Option(None, "--top-k", help="Draw from so many most likely tokens.")
MIN_P = typer.Option(None, "--min-p", help="Draw from tokens of this share of the most likely one's.")
SEED = typer.Option(None, "--seed", help="The same seed gives the same answer; default: the run's, or 0.")
TOKENS = typer.Option(None, "--max-new-tokens", help="Longest answer; default: the run's own, or 512.")
STOP = typer.Option([], "--stop", metavar="TEXT", help="Text that ends an answer; repeatable.")
SETTINGS = typer.Option([], "--set", metavar="NAME=VALUE", help="Any setting; repeatable.")
STATS = typer.Option(False, "--stats", help="Time to the first token and tokens a second, on stderr.")


def generate(
    prompt: str | None = typer.Argument(None, help="What to ask; `-` or nothing reads stdin."),
    file: Path | None = typer.Option(None, "--file", "-f", help="Read the prompt from this file."),
    model: str | None = MODEL,
    adapter: str | None = ADAPTER,
    engine: str | None = ENGINE,
    system: str | None = SYSTEM,
    tools: Path | None = TOOLS,
    temperature: float | None = TEMPERATURE,
    top_p: float | None = TOP_P,
    top_k: int | None = TOP_K,
    min_p: float | None = MIN_P,
    seed: int | None = SEED,
    max_new_tokens: int | None = TOKENS,
    stop: list[str] = STOP,
    settings: list[str] = SETTINGS,
    stream: bool | None = typer.Option(
        None, "--stream/--no-stream", help="Show the answer as it is made; default: on a terminal."
    ),
    stats: bool = STATS,
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Ask a model, or a model with an adapter, one thing."""
    flags = {
        "model.path": model, "adapter": adapter, "engine": engine, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "min_p": min_p, "seed": seed, "max_new_tokens": max_new_tokens,
    }  # fmt: skip
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": _prompt(prompt, file)})
    schemas = read_tools_file(tools)
    chat_model = open_asked(None, flags, stop, settings)
    shown = Screen(sys.stdout.isatty())
    live = not as_json and (sys.stdout.isatty() if stream is None else stream)
    from instep.chat.interrupt import Interrupt

    with Interrupt() as interrupt:
        answer = chat_model.chat(
            messages, schemas, on_text=shown.show if live else None, stop=lambda: interrupt.asked
        )
    if as_json:
        emit_json(result_of(chat_model, answer))
    else:
        if not live:
            shown.show(answer.text)
        shown.end()
    if stats and not as_json:
        typer.echo(stats_line(answer), err=True)
    if interrupt.asked:
        raise typer.Exit(130)


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The argument, the file or stdin; exactly one of them. Raises InputError."""
    from instep.errors import InputError

    if file is not None and prompt is not None:
        raise InputError("a prompt and --file are both given: remove one of them")
    if file is not None:
        text = read_text(file)
    elif prompt is not None and prompt != "-":
        text = prompt
    elif prompt is None and sys.stdin.isatty():
        raise InputError(
            'nothing to ask: give a prompt, such as instep generate "Hello", --file, or text on stdin'
        )
    else:
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise InputError(f"stdin is not UTF-8 text ({error.reason})") from None
        text = text.removesuffix("\n")
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


def read_text(file: Path) -> str:
    """A text file's content without its last line end. Raises InputError."""
    from instep.errors import InputError

    try:
        return file.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise InputError(f"{file} is not UTF-8 text") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from None


def read_tools_file(file: Path | None) -> list[dict[str, Any]]:
    """Tool schemas of a JSON file (a list, or an object with `tools`). Raises InputError."""
    from instep.chat.model import read_tools
    from instep.errors import InputError

    if file is None:
        return []
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON ({error}): expected a list of tool schemas") from None
    value = value.get("tools", [value]) if isinstance(value, dict) else value
    if not isinstance(value, list):
        raise InputError(f"{file}: expected a list of tool schemas, found {type(value).__name__}")
    try:
        return read_tools(value)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def open_asked(target: str | None, flags: dict[str, Any], stop: list[str], overrides: list[str]) -> ChatModel:
    """Load the model that the options name, saying which. Raises InputError."""
    from instep.chat.model import generation_settings, open_model
    from instep.settings_file import parse_overrides

    asked = flags | {"stop_strings": stop or None}
    resolved = generation_settings(target, asked, parse_overrides(overrides))
    chat_model = open_model(resolved)
    report = chat_model.report
    typer.echo(f"  {chat_model.name}, {report.engine} on {report.device} in {report.precision}", err=True)
    return chat_model


class Screen:
    """Text of a model on stdout, piece by piece. On a terminal its control characters are shown, not obeyed."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal
        self._last = ""
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:  # a terminal without UTF-8 must not end the program
            reconfigure(errors="replace")

    def show(self, piece: str) -> None:
        if self._terminal:
            piece = "".join(one if one in "\n\t" or one.isprintable() else _visible(one) for one in piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
        self._last = piece[-1:] or self._last

    def end(self) -> None:
        """Close the last line."""
        if self._last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._last = ""


def _visible(character: str) -> str:
    # Joiners and direction marks are not printable, but harmless parts of scripts and emoji.
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x20 or 0x7F <= code < 0xA0 else character


def result_of(chat_model: ChatModel, answer: Answer) -> dict[str, Any]:
    """The answer with what made it, for `--json`."""
    settings = chat_model.settings
    return {
        "text": answer.text,
        **answer.stats(),
        "model": settings.model.path,
        "adapter": settings.adapter,
        "engine": chat_model.report.engine,
        "device": chat_model.report.device,
        "precision": chat_model.report.precision,
        "temperature": settings.temperature,
        "seed": settings.seed,
    }


def stats_line(answer: Answer) -> str:
    """How long the answer took, for people."""
    speed = answer.tokens_per_second
    rate = "" if speed is None else f", {speed:.1f} tokens/s"
    return (
        f"  first token after {answer.first_token_seconds:.2f} s ({answer.prompt_tokens} tokens of prompt); "
        f"{len(answer.tokens)} tokens{rate}; ended by {answer.stop.value.replace('_', ' ')}"
    )
