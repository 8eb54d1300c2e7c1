"""The quickstart: what it ships, what it refuses, and the whole way on the real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from instep import sessions
from instep.adapters import initial_adapter, load_adapter, lora_b_name, save_adapter
from instep.cli.quickstart import compare, next_commands, sample_request, shipped_sessions
from instep.config import AdapterSettings, ModelSettings, SftSettings
from instep.engines.base import EngineState


def test_the_shipped_sessions_show_what_the_readers_do() -> None:
    conversations, report = sessions.build([shipped_sessions() / "train"])
    assert set(report.formats) == {"pi", "claude-code", "codex", "chat"}
    assert not report.quarantined and not report.skipped_files
    assert report.supervised_turns >= 80
    assert report.not_supervised["abandoned branch"] == 2
    assert {"email", "aws-access-key", "home-directory"} <= set(report.redactions)
    text = repr(conversations)
    for secret in ("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI", "mara.lindqvist@", "/home/mara"):
        assert secret not in text


def test_nothing_held_out_is_trained_on() -> None:
    train, held_out = (
        {message.content for c in sessions.load(shipped_sessions() / split)[0] for message in c.messages}
        for split in ("train", "held_out")
    )
    shared = {text for text in train & held_out if len(text) > 60}
    assert all("agent" in text for text in shared), "only the system prompt may stand on both sides"


def test_the_sample_request_ends_before_the_assistants_second_turn() -> None:
    request = sample_request(shipped_sessions())
    roles = [message.role for message in request.messages]
    assert roles.count("assistant") == 1 and roles[-1] == "tool"
    assert request.tools


def test_an_existing_run_is_refused_before_anything_is_fetched(
    instep: Callable[..., object], tmp_path: Path
) -> None:
    run = tmp_path / "mine"
    run.mkdir()
    (run / "keep.txt").write_text("mine")
    result = instep("quickstart", "--run", run, check=2, env={"INSTEP_HOME": str(tmp_path / "home")})
    assert "already exists" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists()
    assert [path.name for path in run.iterdir()] == ["keep.txt"]


def test_unknown_engines_and_times_are_refused(instep: Callable[..., object], tmp_path: Path) -> None:
    home = {"INSTEP_HOME": str(tmp_path / "home")}
    assert "max_minutes" in instep("quickstart", "--minutes", "0", check=2, env=home).stderr
    assert "engine" in instep("quickstart", "--engine", "abacus", check=2, env=home).stderr
    assert not (tmp_path / "home").exists()


def test_before_and_after_are_the_model_without_and_with_the_adapter(
    tiny_model: Path, tmp_path: Path
) -> None:
    """With B at zero both say the same; with a large B they differ, and `before` stays what it was."""
    adapter = AdapterSettings(rank=2, alpha=4, target_modules=("q_proj", "down_proj"))
    settings = SftSettings(engine="torch", model=ModelSettings(path=str(tiny_model), precision="float32"))
    request = sample_request(shipped_sessions())

    def answers(scale: float) -> dict[str, str]:
        shapes = {
            f"base_model.model.model.layers.{layer}.{name}.lora_A.weight": (2, width)
            for layer in range(2)
            for name, width in (("self_attn.q_proj", 32), ("mlp.down_proj", 64))
        }
        matrices = initial_adapter(shapes, seed=0)
        for name in shapes:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            matrices[lora_b_name(module)] = np.full((32, 2), scale, np.float32)
        zeros = {name: np.zeros_like(value) for name, value in matrices.items()}
        folder = tmp_path / f"adapter-{scale}"
        save_adapter(folder, EngineState(matrices, zeros, zeros, 0), adapter, str(tiny_model))
        return compare(settings, tiny_model, folder, request)

    same, other = answers(0.0), answers(3.0)
    assert same["before"] == same["after"] == other["before"] != other["after"]
    assert same["prompt"] == request.messages[1].content


@pytest.mark.slow
@pytest.mark.model
def test_the_whole_way(smol: Path, instep: Callable[..., object], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    result = instep("quickstart", "--run", run, "--minutes", "0.2", "--json", env={"HF_HUB_OFFLINE": "1"})
    summary = json.loads(result.stdout)
    assert summary["finished"] and Path(summary["folder"]) == run
    before, after = summary["validation_before"], summary["validation_after"]
    assert after["loss"] < before["loss"]
    assert summary["report"]["redactions"]["aws-access-key"] == 1
    assert summary["sample"]["prompt"].startswith("human(1500)")
    assert summary["sample"]["before"] and summary["sample"]["after"]
    assert len(summary["next"]) == 3
    assert load_adapter(run / "adapter")[1].rank == 16
    assert "AKIAIOSFODNN7EXAMPLE" not in "".join(
        path.read_text(errors="ignore")
        for path in run.rglob("*")
        if path.suffix in (".json", ".jsonl", ".toml")
    )


def test_the_next_commands_name_paths_that_can_be_used(tmp_path: Path) -> None:
    show, _, train = (command.split() for command, _ in next_commands(tmp_path / "first"))
    assert Path(show[-1]).is_dir()
    assert not Path(train[-1]).exists() and Path(train[-1]).parent == tmp_path
