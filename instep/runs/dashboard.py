"""Trackio's dashboard over the runs of a folder."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from instep.config import TrackingSettings
from instep.errors import InputError
from instep.runs.folder import CONFIG
from instep.runs.overview import load_run_settings
from instep.runs.trackers import trackio_home
from instep.runs.trackers.trackio_tracker import load


@dataclass(frozen=True)
class Dashboard:
    url: str
    home: Path
    project: str

    def wait(self) -> None:
        """Until Ctrl-C."""
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


@contextlib.contextmanager
def open_trackio(place: Path, port: int | None, browser: bool) -> Iterator[Dashboard]:
    """Serve the dashboard on this machine only, for a run or for the runs of a folder.

    Raises InputError where Trackio is not installed, the place is none, or it holds no tracked run.
    """
    if importlib.util.find_spec("trackio") is None:
        raise InputError("the dashboard needs the package trackio: pip install 'instep[trackio]'")
    if (place / CONFIG).is_file():
        tracking, run = load_run_settings(place).tracking, place
    elif place.is_dir():
        tracking, run = TrackingSettings(), place / "any"
    else:
        raise InputError(f"{place} is neither a run folder nor a folder of runs: see `instep runs list`")
    home = trackio_home(tracking, run)
    if not any(home.glob("*.db")):
        raise InputError(
            f'Trackio holds no run in {home}: train one with tracking.tracker = "trackio", or rebuild it with '
            "instep runs sync RUN --tracker trackio"
        )
    # Trackio prints a greeting and a write token; standard output is for the address alone.
    with contextlib.redirect_stdout(sys.stderr):
        trackio = load(home, None)
        server, url, _, _ = trackio.show(
            project=tracking.project,
            open_browser=browser,
            block_thread=False,
            host="127.0.0.1",
            share=False,
            server_port=port,
        )
    try:
        yield Dashboard(url, home, tracking.project)
    finally:
        server.close()
