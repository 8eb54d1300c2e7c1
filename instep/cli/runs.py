"""`instep runs`: what runs there are, what became of one, its curves, its tracker rebuilt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from instep.cli.output import emit_json

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="runs",
    help="Runs: list them, look at one, compare their curves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
SHOWN_SETTING = 60
"""Characters of a setting's value in the table; --json has all of it."""


@app.command("list")
def list_runs(
    folder: Path = typer.Argument(Path("runs"), metavar="[FOLDER]", help="Folder that holds run folders."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """A table of the runs in a folder, newest first."""
    from instep.errors import InputError
    from instep.runs.overview import describe, find_runs

    found = []
    for path in find_runs(folder):
        try:
            found.append(describe(path))
        except InputError as error:  # one damaged folder does not hide the others
            found.append({"folder": str(path), "state": "unreadable", "state_detail": str(error)})
    if as_json:
        emit_json({"runs": found})
        return
    if not found:
        typer.echo(f"no runs in {folder}/")
        return
    from rich.console import Console

    Console(highlight=False).print(_list_table(found, folder))


def _list_table(found: list[dict[str, Any]], folder: Path) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table("run", "kind", "state", "steps", "held out", "model", pad_edge=False)
    for one in found:
        path = Path(one["folder"])
        name = str(path.relative_to(folder)) if path != folder else path.name
        if "kind" not in one:
            table.add_row(Text(name), "", one["state"], "", "", "")
            continue
        total = f" of {one['total_steps']}" if one["total_steps"] else ""
        table.add_row(
            Text(name), one["kind"], one["state"], f"{one['steps']}{total}", _headline(one["figures"]),
            Text(Path(one["model"]).name),
        )  # fmt: skip
    return table


def _headline(figures: dict[str, Any]) -> str:
    """The figure that the run is judged by, first and last."""
    for name in ("validation/reward", "validation/loss", "train/reward", "train/loss"):
        if name in figures:
            one = figures[name]
            where = "" if name.startswith("validation") else " (train)"
            first, last = one["first"]["value"], one["last"]["value"]
            once = one["first"]["step"] == one["last"]["step"]
            change = f"{first:.4g}" if once else f"{first:.4g} → {last:.4g}"
            return f"{name.partition('/')[2]} {change}{where}"
    return ""


@app.command("show")
def show_run(
    run: Path = typer.Argument(..., metavar="RUN", help="Run folder."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """What a run was asked to do beyond the defaults, its figures, its data, how it ended."""
    from instep.runs.overview import describe

    told = describe(run)
    if as_json:
        emit_json(told)
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    total = f" of {told['total_steps']}" if told["total_steps"] else ""
    console.print(
        f"{told['folder']}: {told['kind']}, {told['state']}, {told['steps']}{total} steps", markup=False
    )
    if told["state_detail"]:
        console.print(told["state_detail"], markup=False)
    _print_settings(console, told["settings"])
    _print_figures(console, told["figures"])
    _print_data(console, told["data"])


def _print_settings(console: Console, settings: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "setting", "value", "default", title="Settings that differ from the defaults", pad_edge=False
    )
    table.title_justify = "left"
    for name, one in settings.items():
        table.add_row(Text(name), _short(one["value"]), _short(one["default"]))
    console.print(table if settings else "every setting is at its default")


def _short(value: Any) -> Any:
    from rich.text import Text

    text = "–" if value is None else str(value)
    return Text(text if len(text) <= SHOWN_SETTING else f"{text[: SHOWN_SETTING - 1]}…")


def _print_figures(console: Console, figures: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not figures:
        console.print("no step has been logged")
        return
    table = Table("figure", "first", "last", "best", title="Figures (step)", pad_edge=False)
    table.title_justify = "left"
    for name, one in sorted(figures.items(), reverse=True):
        points = [f"{one[which]['value']:.5g} ({one[which]['step']})" for which in ("first", "last", "best")]
        table.add_row(Text(name), *points)
    console.print(table)


def _print_data(console: Console, data: dict[str, Any] | None) -> None:
    from rich.table import Table

    if not data or "train" not in data:
        return
    table = Table("data", "train", "held out", pad_edge=False)
    for name, value in data["train"].items():
        if not isinstance(value, dict):
            cells = (value, data["validation"].get(name))
            table.add_row(name.replace("_", " "), *("–" if cell is None else f"{cell:,}" for cell in cells))
    console.print(table)
    for split in ("train", "validation"):
        for reason, count in data[split].get("dropped_turns", {}).items():
            console.print(f"turns left out, {split}: {count}, {reason}", markup=False)
    for name, choice in data.get("choices", {}).items():
        console.print(f"{name}: {choice}", markup=False)


@app.command("open")
def open_dashboard(
    place: Path = typer.Argument(
        Path("runs"), metavar="[RUN|FOLDER]", help="A run, or a folder of runs whose curves are compared."
    ),
    port: int | None = typer.Option(
        None, "--port", min=1, max=65535, help="Port; default: the first free one."
    ),
    browser: bool = typer.Option(True, "--browser/--no-browser", help="Open it in the web browser."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout, with the address."),
) -> None:
    """Start Trackio's dashboard on this machine, for the runs side by side; Ctrl-C ends it."""
    from instep.runs.dashboard import open_trackio

    with open_trackio(place, port, browser) as dashboard:
        if as_json:
            emit_json({"url": dashboard.url, "home": str(dashboard.home), "project": dashboard.project})
        else:
            typer.echo(f"Trackio: {dashboard.url} (project {dashboard.project}); Ctrl-C ends it")
        import sys

        sys.stdout.flush()
        dashboard.wait()


@app.command("sync")
def sync(
    run: Path = typer.Argument(..., metavar="RUN", help="Run folder."),
    tracker: str | None = typer.Option(
        None, "--tracker", help="trackio, tensorboard or wandb; default: the run's own."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Rebuild a run in its tracker from metrics.jsonl."""
    from instep.runs.sync import sync_run

    done = sync_run(run, tracker, lambda text: typer.echo(text, err=True))
    if as_json:
        emit_json(done)
    else:
        typer.echo(f"{done['tracker']}: run {done['id']} holds {done['records']} records")
