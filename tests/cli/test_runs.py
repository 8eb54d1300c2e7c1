"""`instep runs` as a user runs it, and what a run says about its own end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from instep.runs.heartbeat import read_heartbeat
from instep.runs.metrics import read_metrics

TRAIN = [
    "--set", "max_steps=4", "--set", "rows_per_step=2", "--set", "optimizer.learning_rate=0.01",
    "--set", "run.checkpoint_every_steps=2", "--set", "rendering.max_length=192", "--set", "data.validation_share=0.2",
]  # fmt: skip

needs_trackio = pytest.mark.skipif(not importlib.util.find_spec("trackio"), reason="trackio is not installed")


def train(instep: Any, model: Path, data: Path, run: str, *more: str, **keywords: Any) -> Any:
    return instep("sft", "--model", str(model), "--data", str(data), "--run", run, *TRAIN, *more, **keywords)


@pytest.mark.slow
@needs_trackio
def test_a_tracked_run_from_training_to_the_dashboard(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    env = {"INSTEP_TRACKER": "trackio", "TRACKIO_DIR": ""}
    for name in ("one", "two"):
        told = train(instep, tiny_model, chats, f"runs/{name}", "--json", env=env)
        assert json.loads(told.stdout)["finished"], told.stderr
        assert "tracker: trackio, run " in told.stderr and "failed" not in told.stderr
    home = tmp_path / "runs" / ".trackio"

    with sqlite3.connect(home / "instep.db") as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
        configs = dict(connection.execute("SELECT run_name, config FROM configs").fetchall())
    runs = {json.loads(instep("runs", "show", f"runs/{n}", "--json").stdout)["id"] for n in ("one", "two")}
    assert {name for name, _, _ in rows} == runs == set(configs)
    for word in (
        "train/loss",
        "train/token_accuracy",
        "train/memory_resident_bytes",
        "train/supervised_tokens_per_second",
    ):
        steps = {name: [s for n, s, m in rows if n == name and word in json.loads(m)] for name in runs}
        assert all(sorted(found) == [1, 2, 3, 4] for found in steps.values()), word
    config = json.loads(next(iter(configs.values())))
    assert config["rows_per_step"] == 2 and config["optimizer.learning_rate"] == 0.01

    listed = json.loads(instep("runs", "list", "--json").stdout)["runs"]
    assert [(Path(one["folder"]).name, one["state"]) for one in listed] == [
        ("two", "finished"),
        ("one", "finished"),
    ]

    process = subprocess.Popen(
        [sys.executable, "-m", "instep", "runs", "open", "--no-browser", "--json"],
        cwd=tmp_path,
        env={**os.environ, "TRACKIO_DIR": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        line = process.stdout.readline()
        assert line, process.communicate()
        told = json.loads(line)
        assert told["home"] == str(home) and told["project"] == "instep"
        with urllib.request.urlopen(told["url"], timeout=30) as page:
            assert b"rackio" in page.read()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 0
    finally:
        process.kill()


@needs_trackio
def test_a_tracker_that_cannot_open_leaves_no_run_behind(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    more = ["--set", "tracking.tracker=trackio", "--set", f"tracking.folder={tmp_path / 'file'}"]
    told = train(instep, tiny_model, chats, "run", *more, check=2)
    assert "instep: tracker trackio cannot be opened" in told.stderr and "Traceback" not in told.stderr
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_is_told_before_anything_loads(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    missing = [name for name in ("wandb", "tensorboard", "trackio") if not importlib.util.find_spec(name)]
    if not missing:
        pytest.skip("every tracker is installed")
    told = train(instep, tiny_model, chats, "run", "--set", f"tracking.tracker={missing[0]}", check=2)
    assert f"pip install 'instep[{missing[0]}]'" in told.stderr
    assert not (tmp_path / "run").exists()


def test_show_and_list_tell_what_a_run_was_and_how_it_went(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    train(instep, tiny_model, chats, "runs/mine")
    told = json.loads(instep("runs", "show", "runs/mine", "--json").stdout)
    assert told["state"] == "finished" and told["steps"] == 4 and told["kind"] == "sft"
    assert told["settings"]["rows_per_step"] == {"value": 2, "default": 4}
    assert "epochs" not in told["settings"] and "run.folder" not in told["settings"]
    records = list(read_metrics(tmp_path / "runs" / "mine" / "metrics.jsonl"))
    losses = [(r["loss"], r["step"]) for r in records if r["kind"] == "train"]
    figures = told["figures"]["train/loss"]
    for which, (value, step) in (("first", losses[0]), ("last", losses[-1]), ("best", min(losses))):
        assert figures[which] == {"step": step, "value": value}
    accuracy = told["figures"]["validation/token_accuracy"]["best"]["value"]
    assert accuracy == max(r["token_accuracy"] for r in records if r["kind"] == "validation")
    assert told["data"]["train"]["conversations"] + told["data"]["validation"]["conversations"] == 12

    text = instep("runs", "show", "runs/mine").stdout
    assert "optimizer.learning_rate" in text and "train/loss" in text and "supervised tokens" in text
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.toml").write_text("nonsense = 1\n")
    listed = instep("runs", "list").stdout
    assert "mine" in listed and "finished" in listed and "unreadable" in listed


def test_runs_that_are_none_are_one_clear_line(instep: Any, tmp_path: Path) -> None:
    for arguments in (("list", "nowhere"), ("show", "nowhere"), ("sync", "nowhere"), ("open", "nowhere")):
        told = instep("runs", *arguments, check=2)
        assert told.stderr.startswith("instep: ") and told.stderr.count("\n") == 1 and told.stdout == ""


@pytest.mark.slow
def test_a_killed_run_is_explained_when_it_goes_on(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    command = [
        "sft",
        "--model",
        str(tiny_model),
        "--data",
        str(chats),
        "--run",
        "run",
        *TRAIN,
        "--set",
        "epochs=200",
    ]
    command += ["--set", "max_steps=5000", "--set", "run.watch_seconds=0.05"]
    process = subprocess.Popen(
        [sys.executable, "-m", "instep", *command], cwd=tmp_path, stderr=subprocess.DEVNULL, text=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    for _ in range(12000):
        beat = read_heartbeat(tmp_path / "run")
        if (beat and beat.step >= 3) or process.poll() is not None:
            break
        time.sleep(0.01)
    running = json.loads(instep("runs", "show", "run", "--json").stdout)
    process.kill()
    process.wait()
    assert running["state"] == "running"
    killed = json.loads(instep("runs", "show", "run", "--json").stdout)
    assert killed["state"] == "killed" and "ended without a word" in killed["state_detail"]
    told = instep("sft", "--resume", "--run", "run", "--set", "max_steps=10")
    assert "the last run ended without a word" in told.stderr
    again = instep("sft", "--resume", "--run", "run", "--set", "max_steps=11")
    assert "ended without a word" not in again.stderr
    assert json.loads(instep("runs", "show", "run", "--json").stdout)["state"] == "finished"


@pytest.mark.slow
def test_what_lowers_memory_may_change_when_a_run_goes_on(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    train(instep, tiny_model, chats, "run")
    more = ["--set", "model.gradient_checkpointing=true", "--set", "rows_per_batch=2", "--set", "max_steps=5"]
    instep("sft", "--resume", "--run", "run", *more, "--set", "tracking.project=other")
    told = json.loads(instep("runs", "show", "run", "--json").stdout)
    assert told["steps"] == 5 and told["settings"]["model.gradient_checkpointing"]["value"] is True
