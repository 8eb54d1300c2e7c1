"""The mirror of metrics.jsonl: what trackers are told, that they fail loudly at the start and harmlessly later."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from instep.config import SftSettings, TrackingSettings
from instep.errors import InputError, TrainingError
from instep.runs import trackers
from instep.runs.folder import RunFolder
from instep.runs.follow import without_secrets
from instep.runs.metrics import MetricsLog
from instep.runs.mirror import Mirror
from instep.runs.sync import sync_run
from instep.runs.vocabulary import figures
from instep.settings_file import dump_settings

SECRET = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f"

needs_trackio = pytest.mark.skipif(not importlib.util.find_spec("trackio"), reason="trackio is not installed")
needs_tensorboard = pytest.mark.skipif(
    not importlib.util.find_spec("tensorboard"), reason="tensorboard is not installed"
)
needs_wandb = pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INSTEP_TRACKER", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)


def train(step: int, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 2.0 / step, "token_accuracy": 0.5, "applied": True, **more}


def validation(step: int) -> dict[str, Any]:
    return {"kind": "validation", "step": step, "loss": 1.5 / (step + 1), "split": "test"}


def make_run(folder: Path, tracker: str = "trackio", steps: int = 4) -> RunFolder:
    settings = SftSettings(tracking=TrackingSettings(tracker=tracker))  # type: ignore[arg-type]
    run = RunFolder.create(folder, dump_settings(settings))
    log = MetricsLog(run.metrics)
    log.write(validation(0))
    for step in range(1, steps + 1):
        log.write(train(step, gradient_norm=float("nan") if step == 2 else 1.0))
    log.write(validation(steps))
    log.close()
    run.close()
    return run


def in_trackio(home: Path, run_id: str) -> list[tuple[int, dict[str, float]]]:
    """(step, figures) of a run in Trackio's database, read without Trackio."""
    file = home / "instep.db"
    if not file.exists():
        return []
    with contextlib.closing(sqlite3.connect(file, timeout=30)) as connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'metrics'").fetchall():
            return []
        rows = connection.execute(
            "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (run_id,)
        ).fetchall()
    return [(step, json.loads(metrics)) for step, metrics in rows]


def as_logged(run: RunFolder) -> list[tuple[int, dict[str, float]]]:
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(record["step"], figures(record)) for record in records]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.1)
    pytest.fail(f"{what} within {seconds} s")


def test_figures_are_numbers_under_their_kind() -> None:
    record = train(3, reward=None, names=["a"], **{"reward/own.py:short": 0.25})
    assert figures(record) == {
        "train/loss": 2 / 3, "train/token_accuracy": 0.5, "train/applied": 1.0, "train/reward/own.py:short": 0.25,
    }  # fmt: skip
    assert figures(validation(0)) == {"validation/loss": 1.5}


def test_which_tracker_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        trackers.importlib.util, "find_spec", lambda name: True if name == "trackio" else None
    )
    assert trackers.choose("auto") == "trackio"
    assert trackers.choose("none") is None
    with pytest.raises(InputError, match=r"needs the package wandb: pip install 'instep\[wandb\]'"):
        trackers.choose("wandb")
    monkeypatch.setenv("INSTEP_TRACKER", "none")
    assert trackers.choose("auto") is None
    assert trackers.choose("trackio") == "trackio"
    monkeypatch.setenv("INSTEP_TRACKER", "mlflow")
    with pytest.raises(InputError, match="INSTEP_TRACKER = 'mlflow'"):
        trackers.choose("auto")
    monkeypatch.delenv("INSTEP_TRACKER")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    assert trackers.choose("auto") is None


def test_runs_side_by_side_share_trackios_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrackingSettings()
    assert trackers.trackio_home(settings, tmp_path / "runs" / "a") == tmp_path / "runs" / ".trackio"
    stages = tmp_path / "runs" / "many"
    stages.mkdir(parents=True)
    (stages / "stages.toml").touch()
    assert trackers.trackio_home(settings, stages / "1-sft") == tmp_path / "runs" / ".trackio"
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "mine"))
    assert trackers.trackio_home(settings, tmp_path / "runs" / "a") == tmp_path / "mine"
    given = TrackingSettings(folder=str(tmp_path / "asked"))
    assert trackers.trackio_home(given, tmp_path / "runs" / "a") == tmp_path / "asked"


def test_a_space_is_for_trackio_only(tmp_path: Path) -> None:
    settings = TrackingSettings(tracker="none", space_id="me/curves")
    with pytest.raises(InputError, match=r"tracking\.space_id is for trackio"):
        Mirror(settings, tmp_path / "run", print)


def test_secrets_do_not_reach_a_tracker() -> None:
    config = {"task.system_prompt": f"use {SECRET}", "data.path": str(Path.home() / "sessions"), "rows": 3}
    shown = json.dumps(without_secrets(config))
    assert SECRET not in shown and "[REDACTED:" in shown and '"rows": 3' in shown


def mirror_of(run: RunFolder, notes: list[str], **settings: Any) -> Mirror:
    return Mirror(TrackingSettings(**{"tracker": "trackio", **settings}), run.path, notes.append)


@needs_trackio
def test_trackio_holds_what_the_file_holds(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "runs" / "mine"), []
    log = MetricsLog(run.metrics, through_step=4)
    with mirror_of(run, notes) as mirror:
        mirror.begin(run.id, {"model.path": f"https://user:{SECRET}@host/model", "rows_per_step": 4})
        log.write(train(5))
        wait_until(lambda: len(in_trackio(mirror.home, run.id)) == 7, "every record was in Trackio")
        log.write(train(6))
        log.close()
    assert not mirror.failed and mirror.records == 8
    assert in_trackio(mirror.home, run.id) == as_logged(run)
    assert mirror.home == tmp_path / "runs" / ".trackio" and run.id.startswith("mine-")
    assert any(run.id in note for note in notes)
    everything = b"".join(file.read_bytes() for file in mirror.home.rglob("*") if file.is_file())
    assert b"rows_per_step" in everything and SECRET.encode() not in everything


@needs_trackio
def test_a_run_that_goes_on_is_not_told_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for more in (5, 4, 6):  # the second time it goes on from an earlier checkpoint
        log = MetricsLog(run.metrics, through_step=more - 1)
        with mirror_of(run, []) as mirror:
            mirror.begin(run.id, {})
            log.write(train(more))
        log.close()
    assert in_trackio(mirror.home, run.id) == as_logged(run)


@needs_trackio
def test_two_runs_of_one_name_stay_apart(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    ids = []
    for parent in ("a", "b"):
        run = make_run(tmp_path / parent / "run", steps=2)
        with mirror_of(run, [], folder=home) as mirror:
            mirror.begin(run.id, {})
        ids.append(run.id)
    assert ids[0] != ids[1]
    assert [len(in_trackio(Path(home), name)) for name in ids] == [4, 4]


@needs_trackio
def test_a_tracker_that_cannot_open_is_an_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("not a folder")
    with (
        mirror_of(run, [], folder=str(tmp_path / "file")) as mirror,
        pytest.raises(InputError, match="tracker trackio cannot be opened"),
    ):
        mirror.begin(run.id, {})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "instep.db").write_bytes(b"this is no database" * 100)
    with (
        mirror_of(run, [], folder=str(tmp_path / "bad")) as mirror,
        pytest.raises(InputError, match="tracker trackio cannot be opened"),
    ):
        mirror.begin(run.id, {})


@needs_trackio
def test_a_tracker_that_dies_later_is_told_once_and_can_be_rebuilt(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "run"), []
    log = MetricsLog(run.metrics, through_step=4)
    with mirror_of(run, notes) as mirror:
        mirror.begin(run.id, {})
        assert mirror._process
        mirror._process.kill()
        mirror._process.wait()
        for step in range(5, 8):
            log.write(train(step))
            time.sleep(0.1)
            mirror.check()
    log.close()
    told = [note for note in notes if "failed" in note]
    assert len(told) == 1 and "instep runs sync" in told[0] and "exit code -9" in told[0]
    assert in_trackio(mirror.home, run.id) != as_logged(run)
    done = sync_run(run.path, None, notes.append)
    assert done == {"tracker": "trackio", "id": run.id, "records": 9}
    assert in_trackio(mirror.home, run.id) == as_logged(run)


@needs_trackio
def test_a_database_that_breaks_later_is_told_and_sync_says_so_too(tmp_path: Path) -> None:
    run, notes = make_run(tmp_path / "run"), []
    log = MetricsLog(run.metrics, through_step=4)
    with mirror_of(run, notes) as mirror:
        mirror.begin(run.id, {})
        wait_until(lambda: len(in_trackio(mirror.home, run.id)) == 6, "the records were in Trackio")
        for file in mirror.home.glob("instep.db*"):
            file.unlink()
        (mirror.home / "instep.db").write_bytes(b"this is no database" * 100)
        log.write(train(5))

        def failed() -> bool:
            mirror.check()
            return mirror.failed

        wait_until(failed, "the failure was told")
        assert mirror._process
        mirror._process.kill()
    log.close()
    assert sum("failed" in note for note in notes) == 1
    with pytest.raises((InputError, TrainingError)):
        sync_run(run.path, None, notes.append)
    (mirror.home / "instep.db").unlink()
    sync_run(run.path, None, notes.append)
    assert in_trackio(mirror.home, run.id) == as_logged(run)


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@needs_trackio
def test_what_a_killed_run_has_logged_is_still_handed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    program = (
        "import os, pathlib, signal, sys\n"
        "from instep.config import TrackingSettings\nfrom instep.runs.mirror import Mirror\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "mirror = Mirror(TrackingSettings(tracker='trackio'), path, print)\n"
        "mirror.start()\nmirror.begin(sys.argv[2], {})\n"
        "print(mirror._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run.path), run.id], check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid = int(done.stdout.split()[-1])
    wait_until(
        lambda: in_trackio(tmp_path / ".trackio", run.id) == as_logged(run), "the records were in Trackio"
    )
    wait_until(lambda: ended(pid), "the tracker's process ended")


def test_sync_refuses_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="not a run folder"):
        sync_run(tmp_path, None, print)
    run = make_run(tmp_path / "run", "none")
    with pytest.raises(InputError, match="no tracker to rebuild"):
        sync_run(run.path, None, print)
    with pytest.raises(InputError, match=r"tracking|tracker"):
        sync_run(run.path, "mlflow", print)
    locked = RunFolder.reopen(run.path)
    with pytest.raises(InputError, match="is being trained"):
        sync_run(run.path, None, print)
    locked.close()


@needs_tensorboard
def test_tensorboard_gets_the_same(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(tmp_path / "run", "tensorboard")
    for _ in range(2):  # the second time replaces the first
        assert sync_run(run.path, None, print)["records"] == 6
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    loss = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert loss == [(step, pytest.approx(2 / step)) for step in range(1, 5)]
    assert [event.step for event in events.Scalars("validation/loss")] == [0, 4]
    assert [event.step for event in events.Scalars("train/gradient_norm")] == [1, 3, 4]


@needs_wandb
def test_weights_and_biases_gets_the_same_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = make_run(tmp_path / "run", "wandb")
    assert sync_run(run.path, None, print)["records"] == 6
    (file,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    for word in (b"train/loss", b"validation/loss", run.id.encode(), b"rows_per_step"):
        assert word in content
    for word in (sys.executable.encode(), b"instep.runs.follow"):
        assert word not in content


@needs_wandb
def test_weights_and_biases_without_a_login_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = make_run(tmp_path / "run", "wandb")
    with pytest.raises(InputError, match=r"tracker wandb cannot be opened: .*(api_key|login)"):
        sync_run(run.path, None, print)


SERVER = """
import contextlib, sys, threading, trackio
with contextlib.redirect_stdout(sys.stderr):
    *_, url = trackio.show(open_browser=False, block_thread=False, host="127.0.0.1", share=False)
print(url, flush=True)
threading.Event().wait()
"""


@needs_trackio
def test_a_trackio_server_gets_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a Space, too: what a server has of a run is not sent again."""
    home = tmp_path / "server"
    home.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env={**os.environ, "TRACKIO_DIR": str(home), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert server.stdout
        monkeypatch.setenv("TRACKIO_SERVER_URL", server.stdout.readline().strip())
        run = make_run(tmp_path / "run")
        assert sync_run(run.path, None, print)["records"] == 6
        wait_until(lambda: in_trackio(home, run.id) == as_logged(run), "the server had the records")
        log = MetricsLog(run.metrics, through_step=4)
        log.write(train(5))
        log.close()
        sync_run(run.path, None, print)
        wait_until(lambda: in_trackio(home, run.id) == as_logged(run), "the server had the new record")
    finally:
        server.kill()
        server.communicate()
