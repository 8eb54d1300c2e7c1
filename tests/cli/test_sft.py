"""`instep sft` as a user runs it: a real (tiny) model, real files, real signals."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from instep.errors import InputError
from instep.loops.run import adapter_folder
from instep.runs.checkpoint import load_checkpoint
from instep.runs.metrics import read_metrics

FAST = [
    "--set", "epochs=6", "--set", "rows_per_step=2", "--set", "optimizer.learning_rate=0.01",
    "--set", "run.checkpoint_every_steps=2", "--set", "run.evaluate_every_steps=6",
    "--set", "rendering.max_length=192", "--set", "data.validation_share=0.2",
]  # fmt: skip


def arguments(model: Path, data: Path, run: str = "run", *more: str) -> list[str]:
    return ["sft", "--model", str(model), "--data", str(data), "--run", run, *FAST, *more]


@pytest.fixture(scope="module")
def finished(
    tiny_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """One uninterrupted run: its folder and its summary."""
    folder = tmp_path_factory.mktemp("finished")
    result = subprocess.run(
        [sys.executable, "-m", "instep", *arguments(tiny_model, chats), "--json"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder / "run", json.loads(result.stdout)


def test_a_run_learns_and_leaves_everything_a_user_needs(finished: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = finished
    assert summary["finished"] and summary["validation_after"]["loss"] < summary["validation_before"]["loss"]
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {"config.toml", "metrics.jsonl", "summary.json", "checkpoints", "adapter"}
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"last", "best"}
    train = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert all(r["supervised_tokens"] > 0 and r["applied"] for r in train)
    assert len(train) == summary["steps"] == summary["total_steps"]


def test_the_adapter_loads_in_peft_and_gives_the_held_out_loss_it_was_reported_with(
    finished: tuple[Path, dict[str, Any]], tiny_model: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from instep.config import SftSettings
    from instep.loops.sft_data import prepare
    from instep.settings_file import load_resolved

    folder, summary = finished
    data = prepare(load_resolved(SftSettings, folder / "config.toml"))
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16), folder / "adapter"
    )
    loss = weight = 0.0
    for sample in data.validation.samples:
        tokens = torch.tensor(sample.tokens[None].astype(np.int64))
        with torch.no_grad():
            logprob = model(tokens).logits[0, :-1].float().log_softmax(-1)
        picked = logprob.gather(1, tokens[0, 1:, None])[:, 0].numpy()
        loss -= float((picked * sample.weight[1:]).sum())
        weight += float(sample.weight.sum())
    reported = summary["best_validation_loss"]
    assert loss / weight == pytest.approx(reported, rel=0.02)  # bfloat16 base


def test_dry_run_accounts_for_every_turn_and_writes_nothing(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    report = json.loads(instep(*arguments(tiny_model, chats, "run", "--dry-run", "--json")).stdout)
    for split in ("train", "validation"):
        one = report[split]
        assert one["assistant_turns"] == one["supervised_turns"] + sum(one["dropped_turns"].values())
        for name in (
            "conversations",
            "windows",
            "rows",
            "processed_tokens",
            "supervised_tokens",
            "padding_share",
        ):
            assert name in one
    assert report["train"]["conversations"] + report["validation"]["conversations"] == 12
    assert report["train"]["assistant_turns"] + report["validation"]["assistant_turns"] == 24
    assert not (tmp_path / "run").exists() and not (tmp_path / "runs").exists()


def final_state(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoints" / "last" / "state.safetensors")


def assert_same_run(folder: Path, reference: Path) -> None:
    expected = final_state(reference)
    for name, value in final_state(folder).items():
        assert np.array_equal(value, expected[name]), name
    curves = []
    for run in (folder, reference):
        records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
        curves.append([(r["step"], r["loss"]) for r in records])
    assert curves[0] == curves[1]


def start(folder: Path, command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "instep", *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    for _ in range(6000):
        if sum(r["kind"] == "train" for r in read_metrics(run / "metrics.jsonl")) >= steps:
            return
        if process.poll() is not None:
            return
        time.sleep(0.01)
    raise AssertionError("the run made no progress")


def test_ctrl_c_checkpoints_says_how_to_go_on_and_resume_is_bit_for_bit(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    process = start(tmp_path, arguments(tiny_model, chats))
    wait_for_steps(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "instep sft --resume --run run" in stdout
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last")[1].step >= 3
    instep("sft", "--resume", "--run", "run")
    assert_same_run(tmp_path / "run", finished[0])


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_more_than_the_steps_since_the_last_checkpoint(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    rng = random.Random(0)
    reached = 0
    for attempt in range(4):
        more = ["sft", "--resume", "--run", "run"] if (tmp_path / "run" / "config.toml").exists() else None
        process = start(tmp_path, more or arguments(tiny_model, chats))
        wait_for_steps(tmp_path / "run", reached + 1 + attempt, process)
        time.sleep(rng.random() * 0.3)
        process.kill()
        process.communicate()
        last = tmp_path / "run" / "checkpoints" / "last"
        if last.exists():
            step = load_checkpoint(last)[1].step
            records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "train"]
            assert len(records) - step <= 2 + 1 and step >= reached
            reached = step
    instep("sft", "--resume", "--run", "run")
    assert_same_run(tmp_path / "run", finished[0])


def test_an_existing_run_is_never_overwritten(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    result = instep(*arguments(tiny_model, chats), check=2)
    assert "already exists" in result.stderr and "--resume" in result.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]


def test_resume_refuses_other_data_and_other_settings(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "chats.jsonl"
    mine.write_text(chats.read_text())
    instep(*arguments(tiny_model, mine, "run", "--set", "max_steps=2"))
    refused = instep("sft", "--resume", "--run", "run", "--set", "adapter.rank=4", check=2)
    assert "adapter.rank cannot change" in refused.stderr
    mine.write_text("".join(mine.read_text().splitlines(keepends=True)[:-2]))
    refused = instep("sft", "--resume", "--run", "run", "--set", "max_steps=4", check=2)
    assert "data" in refused.stderr and "changed" in refused.stderr
    mine.write_text(chats.read_text())
    instep("sft", "--resume", "--run", "run", "--set", "max_steps=4")
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last")[1].step == 4


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in result.stderr.splitlines() if line.startswith("instep: ")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    return lines[0]


@pytest.mark.parametrize("name", ["missing", "empty", "binary", "foreign", "unsupervised", "folder"])
def test_bad_data_is_one_clear_line_and_leaves_nothing(
    instep: Any, tiny_model: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    content = {
        "empty": b"",
        "binary": bytes(range(256)) * 20,
        "foreign": b'{"x": 1}\n{"y": 2}\n',
        "unsupervised": b'{"messages": [{"role": "user", "content": "hello"}]}\n',
    }
    if name == "folder":
        path.mkdir()
    elif name in content:
        path.write_bytes(content[name])
    line = one_line(instep(*arguments(tiny_model, path), check=2))
    assert name in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("adapter.rank=0", "adapter.rank"),
        ("adapter.target_modules=['nope']", "nope"),
        ("rendering.max_length=100000", "context"),
        ("rendering.min_context=500", "min_context"),
        ("nonsense=1", "nonsense"),
        ("model.device=cuda", "cuda"),
    ],
)
def test_bad_settings_are_one_clear_line(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path, setting: str, words: str
) -> None:
    assert words in one_line(instep(*arguments(tiny_model, chats, "run", "--set", setting), check=2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["no such folder", "not a model", "no template", "truncated weights"])
def test_bad_models_are_one_clear_line(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path, kind: str
) -> None:
    model = tmp_path / "model"
    if kind != "no such folder":
        model.mkdir()
    if kind == "not a model":
        (model / "notes.txt").write_text("hello")
    elif kind != "no such folder":
        for file in tiny_model.iterdir():
            (model / file.name).write_bytes(file.read_bytes())
        if kind == "no template":
            (model / "chat_template.jinja").unlink(missing_ok=True)
            config = json.loads((model / "tokenizer_config.json").read_text())
            config.pop("chat_template", None)
            (model / "tokenizer_config.json").write_text(json.dumps(config))
        else:
            weights = (model / "model.safetensors").read_bytes()
            (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    one_line(instep(*arguments(model, chats), check=2))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 2 MB, where this machine lets us mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small file system here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_full_disk_ends_with_one_line_and_an_intact_checkpoint(
    instep: Any, tiny_model: Path, chats: Path, small_disk: Path
) -> None:
    run = small_disk / "run"
    instep(
        *arguments(tiny_model, chats, str(run), "--set", "max_steps=2", "--set", "data.validation_share=0")
    )
    before = final_state(run)
    filler = small_disk / "filler"
    free = os.statvfs(small_disk)
    filler.write_bytes(b"x" * max(0, free.f_bavail * free.f_frsize - 40_000))
    line = one_line(instep("sft", "--resume", "--run", str(run), "--set", "max_steps=6", check=2))
    assert "space" in line
    for name, value in final_state(run).items():
        assert np.array_equal(value, before[name])
    filler.unlink()
    instep("sft", "--resume", "--run", str(run), "--set", "max_steps=6")


def test_full_fine_tuning_writes_a_model_that_transformers_loads(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more = [
        "--set",
        "adapter.kind=full",
        "--set",
        "model.precision=float32",
        "--set",
        "max_steps=6",
        "--json",
    ]
    summary = json.loads(instep(*arguments(tiny_model, chats, "run", *more)).stdout)
    assert summary["validation_after"]["loss"] < summary["validation_before"]["loss"]
    trained, base = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (tmp_path / "run" / "model", tiny_model)
    )
    expected = load_checkpoint(tmp_path / "run" / "checkpoints" / "best")[0].parameters
    for name, value in trained.named_parameters():
        assert np.array_equal(value.detach().numpy(), expected[name]), name
    assert not torch.equal(trained.lm_head.weight, base.lm_head.weight)
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    with pytest.raises(InputError, match="trained every parameter"):
        adapter_folder(tmp_path / "run")


def test_a_damaged_best_checkpoint_does_not_cost_the_result(
    instep: Any, finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished[0], run)
    best = run / "checkpoints" / "best"
    manifest = json.loads((best / "checkpoint.json").read_text())
    last = load_checkpoint(run / "checkpoints" / "last")[1]
    # As if an earlier step had been the best.
    for name in ("best", "last"):
        file = run / "checkpoints" / name / "checkpoint.json"
        tree = json.loads(file.read_text())
        tree["progress"]["best_step"] = last.step - 1
        file.write_text(json.dumps(tree))
    shutil.rmtree(run / "adapter")
    (run / "summary.json").unlink()
    with (best / "state.safetensors").open("r+b") as file:
        file.truncate(100)
    told = instep("sft", "--resume", "--run", str(run))
    assert "is damaged" in told.stderr and (run / "adapter" / "adapter_model.safetensors").is_file()
    assert manifest["format"] == 1 and json.loads((run / "summary.json").read_text())[
        "adapter_from"
    ].startswith("last")


def test_tokens_of_another_model_leave_no_run_folder(
    instep: Any, tiny_model: Path, chats: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:100]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    told = instep(*arguments(model, chats), check=2)
    assert "outside the model's vocabulary" in told.stderr and not (tmp_path / "run").exists()
