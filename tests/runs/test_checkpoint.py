"""Checkpoints and run folders: whole or not at all, whatever happens in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from instep.engines.base import EngineState
from instep.errors import InputError, TrainingError
from instep.files import replacing_folder, settle_folder, write_atomically
from instep.runs.checkpoint import Progress, load_checkpoint, save_checkpoint
from instep.runs.folder import RunFolder
from instep.runs.metrics import MetricsLog, read_metrics


def make_state(value: float) -> EngineState:
    def tree(scale: float) -> dict[str, np.ndarray]:
        return {f"layer.{i}.lora_A.weight": np.full((2, 3), value * scale + i, np.float32) for i in range(3)}

    return EngineState(tree(1), tree(2), tree(3), step=7)


def equal(a: EngineState, b: EngineState) -> bool:
    return a.step == b.step and all(
        np.array_equal(getattr(a, kind)[name], getattr(b, kind)[name])
        for kind in ("parameters", "exp_avg", "exp_avg_sq")
        for name in a.parameters
    )


PROGRESS = Progress(step=7, data_fingerprint="abc", best_validation_loss=1.5, first_validation={"loss": 2.0})


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last", make_state(1), PROGRESS, "seed = 0\n")
    state, progress = load_checkpoint(tmp_path / "last")
    assert equal(state, make_state(1)) and progress == PROGRESS


def test_non_finite_values_are_never_stored(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "last", make_state(1), PROGRESS, "")
    bad = make_state(2)
    bad.exp_avg["layer.1.lora_A.weight"][0, 0] = np.nan
    with pytest.raises(TrainingError, match=r"exp_avg of layer\.1"):
        save_checkpoint(tmp_path / "last", bad, PROGRESS, "")
    assert equal(load_checkpoint(tmp_path / "last")[0], make_state(1))


@pytest.mark.parametrize("name", ["state.safetensors", "checkpoint.json", "config.toml"])
@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
def test_damage_is_found(tmp_path: Path, name: str, damage: str) -> None:
    folder = tmp_path / "last"
    save_checkpoint(folder, make_state(1), PROGRESS, "seed = 0\n")
    file = folder / name
    data = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(InputError, match="checkpoint"):
        load_checkpoint(folder)


KILLED = """
import os, pathlib, sys
from instep.files import replacing_folder
moment, target = sys.argv[1], pathlib.Path(sys.argv[2])
count = 0
def rename(self, to, plain=pathlib.Path.rename):
    global count
    count += 1
    if moment == f"before rename {count}": os._exit(9)
    result = plain(self, to)
    if moment == f"after rename {count}": os._exit(9)
    return result
pathlib.Path.rename = rename
with replacing_folder(target) as partial:
    (partial / "a").write_text("new")
    if moment == "while writing": os._exit(9)
    (partial / "b").write_text("new")
"""


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    "moment", ["while writing", *(f"{when} rename {i}" for i in (1, 2, 3) for when in ("before", "after"))]
)
def test_a_process_killed_at_any_moment_leaves_the_old_or_the_new_folder(
    tmp_path: Path, moment: str, old: bool
) -> None:
    target = tmp_path / "last"
    if old:
        target.mkdir()
        for name in "ab":
            (target / name).write_text("old")
    subprocess.run([sys.executable, "-c", KILLED, moment, str(target)], check=False)
    settle_folder(target)
    if not target.exists():
        assert not old
        return
    contents = {file.name: file.read_text() for file in target.iterdir()}
    assert contents in ({"a": "old", "b": "old"}, {"a": "new", "b": "new"})
    # And the next write goes on as if nothing had happened.
    with replacing_folder(target) as partial:
        (partial / "a").write_text("next")
    assert [file.read_text() for file in target.iterdir()] == ["next"]
    assert {path.name for path in tmp_path.iterdir()} == {"last"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log._file.close()
    log._file = Path("/dev/full").open("a")  # noqa: SIM115
    with pytest.raises(InputError, match="no space left"):
        log.write({"step": 1})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission_is_one_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="no permission"):
        write_atomically(tmp_path / "x", "text")


def test_a_file_in_the_way_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file"):
        RunFolder.create(tmp_path / "file" / "run", "")
    with pytest.raises(InputError, match="already exists"):
        RunFolder.create(tmp_path / "file", "")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_folder_is_never_overwritten_nor_shared(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "seed = 0\n")
    with pytest.raises(InputError, match="already exists"):
        RunFolder.create(tmp_path / "run", "")
    with pytest.raises(InputError, match=f"in use by process {os.getpid()}"):
        RunFolder.reopen(tmp_path / "run")
    run.close()
    RunFolder.reopen(tmp_path / "run").close()
    with pytest.raises(InputError, match="not a run folder"):
        RunFolder.reopen(tmp_path)


def test_metrics_are_cut_at_the_step_that_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 6):
        log.write({"step": step, "loss": float("nan") if step == 2 else 1.0})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4, 5]
    again = MetricsLog(path, through_step=3)
    again.write({"step": 4})
    again.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[1]["loss"] is None


def test_progress_reads_back_every_field(tmp_path: Path) -> None:
    progress = replace(PROGRESS, last_validation={"loss": 1.0, "token_accuracy": 0.5}, evaluated_step=7)
    save_checkpoint(tmp_path / "last", make_state(0), progress, "")
    assert load_checkpoint(tmp_path / "last")[1] == progress


@pytest.mark.parametrize("damage", [b"garbage{", b"[1]", b"\xff\xfe"])
def test_a_damaged_line_costs_no_other(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in range(1, 7):
        log.write({"step": step})
    log.close()
    lines = path.read_bytes().split(b"\n")
    lines[1] = damage
    path.write_bytes(b"\n".join(lines) + b'{"step": 7, "torn')
    MetricsLog(path, through_step=4).close()
    assert [record["step"] for record in read_metrics(path)] == [1, 3, 4]
    MetricsLog(path, through_step=4).close()
    assert len(path.read_text(encoding="utf-8").split("\n")) == 5  # the damaged line is still there


def test_a_new_run_folder_that_cannot_be_filled_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise InputError("no space left on the disk")

    monkeypatch.setattr("instep.runs.folder.write_atomically", full)
    with pytest.raises(InputError, match="no space"):
        RunFolder.create(tmp_path / "run", "")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="cannot write"):
        RunFolder.create(tmp_path / ("x" * 300), "")


@pytest.mark.parametrize(
    "change", [{"sha256": []}, {"progress": {"step": "x"}}, {"progress": {"step": -5}}, {"format": None}]
)
def test_a_manifest_of_wrong_types_is_one_clear_error(tmp_path: Path, change: dict[str, object]) -> None:
    folder = tmp_path / "last"
    save_checkpoint(folder, make_state(1), Progress(step=3), "")
    manifest = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps(manifest | change))
    with pytest.raises(InputError, match="checkpoint"):
        load_checkpoint(folder)
