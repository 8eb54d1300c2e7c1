"""How a run looks in the terminal: a live bar where there is a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

QUIET_SECONDS = 5.0
"""Without a terminal, at most one line of training metrics in so many seconds."""


def duration(seconds: float) -> str:
    """Seconds as a person says them: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def say_stopped(console: Console, command: str, summary: dict[str, Any]) -> None:
    """How to go on with a run that was interrupted."""
    steps, total = summary["steps"], summary["total_steps"]
    console.print(
        f"Stopped after step {steps} of {total}; everything so far is kept. Go on with:", markup=False
    )
    console.print(f"  instep {command} --resume --run {summary['folder']}", markup=False)


class ConsoleListener:
    """Shows a run on stderr, so that stdout stays free for `--json`."""

    def __init__(self, total_steps: int | None = None) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._last_line = 0.0
        self._bar: Progress | None = None
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=total_steps, detail="")

    def __enter__(self) -> ConsoleListener:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        self.console.print(f"  {text}", markup=False, soft_wrap=True)

    def phase(self, name: str, done: int, total: int) -> None:
        if self._bar:
            self._bar.update(self._task, description=name, detail=f"{done} of {total}")

    def metrics(self, record: dict[str, Any], remaining_seconds: float | None) -> None:
        if record["kind"] == "validation":
            self.console.print(
                f"  step {record['step']:>5}  held out: {_figures(record)}  ({duration(record['seconds'])})",
                markup=False,
                soft_wrap=True,
            )
            return
        left = "" if remaining_seconds is None else f"  {duration(remaining_seconds)} left"
        if record["kind"] == "evaluation":
            self._evaluated(record, left)
            return
        text = _figures(record) + left
        if self._bar:
            seconds = record["seconds"]
            total = record["step"] + (
                round(remaining_seconds / seconds) if remaining_seconds and seconds else 0
            )
            self._bar.update(
                self._task,
                description=f"step {record['step']}",
                completed=record["step"],
                total=total,
                detail=text,
            )
        if not self._bar and time.monotonic() - self._last_line >= QUIET_SECONDS:
            self._last_line = time.monotonic()
            self.console.print(f"  step {record['step']:>5}  {text}", markup=False, soft_wrap=True)

    def _evaluated(self, record: dict[str, Any], left: str) -> None:
        name, done, total = f"{record['model']}, {record['mode']}", record["done"], record["total"]
        text = f"{done} of {total} completions  accuracy so far {record['accuracy']:.1%}{left}"
        if self._bar:
            self._bar.update(self._task, description=name, completed=done, total=total, detail=text)
        elif time.monotonic() - self._last_line >= QUIET_SECONDS:
            self._last_line = time.monotonic()
            self.console.print(f"  {name}: {text}", markup=False, soft_wrap=True)


def _figures(record: dict[str, Any]) -> str:
    """The figures of a record that a person follows a run by."""
    if "reward" in record:
        parts = [f"reward {record['reward']:.3f}"]
        parts += [f"{n[7:]} {v:.2f}" for n, v in record.items() if n.startswith("reward/") and v is not None]
        parts.append(f"{record['completion_tokens_mean']:.0f} tokens, {record['truncated_share']:.0%} cut")
        if record.get("kl") is not None:
            parts.append(f"KL {record['kl']:.4f}")
        return "  ".join(parts)
    if record["kind"] == "validation":
        return f"loss {record['loss']:.4f}  accuracy {record['token_accuracy']:.1%}  ({record['rows']} rows)"
    supervised, speed = record["supervised_tokens"], record["supervised_tokens_per_second"]
    return f"loss {record['loss']:.4f}  {supervised} supervised tokens, {speed:.0f}/s"
