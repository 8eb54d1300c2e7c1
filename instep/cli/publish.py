"""`instep publish`: a run's result on the Hugging Face Hub, with a card made from the run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from instep.cli.output import emit_json

if TYPE_CHECKING:
    from instep.publishing.bundle import Bundle


def publish(
    runs: list[Path] = typer.Argument(..., metavar="RUN…", help="Finished runs."),
    repo: str = typer.Option(
        ..., "--repo", metavar="OWNER/NAME", help="Repository; {run} in it stands for the run folder's name."
    ),
    base: str | None = typer.Option(
        None, "--base", metavar="OWNER/NAME", help="The base model on the Hub, where the run names a folder."
    ),
    public: bool = typer.Option(False, "--public", help="For everybody to read; without it private."),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="List files and sizes, print the card; upload nothing."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Publish finished runs to the Hugging Face Hub, private by default."""
    from instep.errors import InputError
    from instep.publishing.bundle import make_bundle, repositories
    from instep.publishing.hub import upload

    # All are checked before the first is uploaded.
    bundles = [make_bundle(run, name, base) for run, name in zip(runs, repositories(runs, repo), strict=True)]
    if dry_run:
        if as_json:
            emit_json({"published": False, "bundles": [_described(bundle) for bundle in bundles]})
        else:
            for bundle in bundles:
                _tell(bundle, public)
        return
    done = []
    for bundle in bundles:
        try:
            result = upload(bundle, private=not public)
        except InputError as error:
            ready = f"; published before it: {', '.join(one['repo'] for one in done)}" if done else ""
            raise InputError(f"{error}{ready}") from error
        done.append(_described(bundle) | asdict(result))
        if not as_json:
            how = "created" if result.created else "updated"
            typer.echo(
                f"{result.url}  {how}, {'private' if result.private else 'public'}, commit {result.commit[:10]}"
            )
    if as_json:
        emit_json({"published": True, "bundles": done})


def _described(bundle: Bundle) -> dict[str, object]:
    return {"run": str(bundle.run), "repo": bundle.repo, "files": bundle.sizes(), "card": bundle.card}


def _tell(bundle: Bundle, public: bool) -> None:
    typer.echo(f"{bundle.run} → {bundle.repo} ({'public' if public else 'private'}); nothing is uploaded\n")
    for name, size in bundle.sizes().items():
        typer.echo(f"  {size:>12,} bytes  {name}")
    typer.echo(f"\n{bundle.card}")
