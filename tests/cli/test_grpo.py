"""`instep grpo` and `instep run` as a user runs them: a real (tiny) model, real files, real signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from instep.cli.app import main
from instep.runs.metrics import read_metrics

REWARDS = '''
def early(prompts, completions, messages, columns):
    """The share of letters in the first half of the alphabet: it differs between any two completions."""
    return [sum(c in "abcdefghijklm" for c in text.lower()) / (1 + len(text)) for text in completions]


def digits(prompts, completions, messages, columns):
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]


def short(prompts, completions, messages, columns):
    return [1.0]


def words(prompts, completions, messages, columns):
    return ["good"] * len(completions)


def raises(prompts, completions, messages, columns):
    return [columns["difficulty"][0] for _ in completions]


def three(prompts, completions, messages):
    return [0.0] * len(completions)
'''
BROKEN = "import nothing_of_that_name\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with tasks and reward files."""
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def arguments(model: Path, *more: str, run: str = "run") -> list[str]:
    settings = [
        'rewards.functions=["mine.py:early", "correctness"]', "rollouts.group_size=4", "rollouts.max_new_tokens=8",
        "tasks_per_step=2", "max_steps=8", "evaluation_tasks=4", "watchdog_steps=99",
        "model.precision=float32", "adapter.rank=4", "adapter.alpha=8", "optimizer.learning_rate=0.01",
        "task.system_prompt=", "run.checkpoint_every_steps=2", "run.evaluate_every_steps=4",
    ]  # fmt: skip
    sets = [part for setting in settings for part in ("--set", setting)]
    return ["grpo", "--model", str(model), "--task", "tasks.jsonl", "--run", run, *sets, *more]


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
    for _ in range(12000):
        if sum(r["kind"] == "train" for r in read_metrics(run / "metrics.jsonl")) >= steps:
            return
        if process.poll() is not None:
            return
        time.sleep(0.01)
    raise AssertionError("the run made no progress")


def final_state(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / "last" / "state.safetensors")


def test_killed_and_interrupted_equals_uninterrupted_and_leaves_everything_a_user_needs(
    instep: Any, tiny_model: Path, place: Path
) -> None:
    result = instep(*arguments(tiny_model, run="whole"), "--json")
    summary = json.loads(result.stdout)
    whole = place / "whole"
    assert summary["finished"] and summary["steps"] == 8 and summary["rollouts"] == 64
    names = {path.name for path in whole.iterdir() if not path.name.startswith(".")}
    kept = {"config.toml", "metrics.jsonl", "rollouts.jsonl", "summary.json", "checkpoints", "adapter"}
    assert names == kept
    train = [r for r in read_metrics(whole / "metrics.jsonl") if r["kind"] == "train"]
    assert all(r["comparison_timeouts"] == 0 and r["log_ratio_max"] < 1e-3 for r in train)
    assert "advantage +" in result.stderr and "early" in result.stderr  # a few rollouts on the console
    assert max(len(line) for line in result.stderr.splitlines()) < 400

    process = start(place, arguments(tiny_model))
    wait_for_steps(place / "run", 3, process)
    process.kill()
    process.communicate()
    process = start(place, ["grpo", "--resume", "--run", "run"])
    wait_for_steps(place / "run", 5, process)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    if process.returncode == 130:
        assert "instep grpo --resume --run run" in stdout
        instep("grpo", "--resume", "--run", "run")
    else:
        assert process.returncode == 0, stderr
    expected = final_state(whole)
    for name, value in final_state(place / "run").items():
        assert np.array_equal(value, expected[name]), name
    assert (place / "run" / "rollouts.jsonl").read_text() == (whole / "rollouts.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.model
def test_the_reward_rises_on_a_real_model(instep: Any, smol: Path, place: Path) -> None:
    """The share of digits in what SmolLM2 writes, greedily, on prompts that it was not trained on."""
    sets = [
        'rewards.functions=["mine.py:digits"]', "rollouts.group_size=8", "rollouts.max_new_tokens=12", "max_steps=10",
        "evaluation_tasks=4", "optimizer.learning_rate=1e-3", "objective.beta=0", "run.evaluate_every_steps=99",
    ]  # fmt: skip
    options = [part for setting in sets for part in ("--set", setting)]
    command = ["grpo", "--model", str(smol), "--task", "tasks.jsonl", "--run", "run", *options, "--json"]
    summary = json.loads(instep(*command).stdout)
    before, after = summary["validation_before"], summary["validation_after"]
    assert after["reward"] > before["reward"] + 0.1
    train = [r for r in read_metrics(place / "run" / "metrics.jsonl") if r["kind"] == "train"]
    rewards = [r["reward"] for r in train]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1


def test_a_profile_runs_with_overrides(instep: Any, tiny_model: Path, tmp_path: Path) -> None:
    sets = [
        "max_steps=1",
        "task.test_size=6",
        "task.train_size=20",
        "evaluation_tasks=2",
        "rollouts.max_new_tokens=6",
    ]
    more = [part for setting in sets for part in ("--set", setting)]
    command = ["grpo", "--config", "smoke_test", "--model", tiny_model, "--run", "run", *more, "--json"]
    summary = json.loads(instep(*command).stdout)
    assert summary["finished"] and summary["task"] == "chain_sum/train"
    # Its own config.toml holds every setting, and can be run again.
    again = ["grpo", "--config", "run/config.toml", "--run", "again", "--json"]
    assert json.loads(instep(*again).stdout)["validation_after"] == summary["validation_after"]


@pytest.fixture
def refused(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process; returns its one line. No weights may have been loaded, nothing written."""

    def run(*command: str | Path, code: int = 2) -> str:
        from instep.engines.torch.engine import TorchEngine

        def load(*_: Any) -> None:
            raise AssertionError("the weights were loaded before the input was refused")

        monkeypatch.setattr(TorchEngine, "load", load)
        monkeypatch.chdir(place)
        monkeypatch.setattr(sys, "argv", ["instep", *map(str, command)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == code, printed.err
        lines = [line for line in printed.err.splitlines() if line.startswith("instep: ")]
        assert len(lines) == 1 and printed.out == "", printed.err
        assert not (place / "run").exists() and not (place / "runs").exists()
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ('rewards.functions=["none.py:early"]', ["none.py:early", "no file"]),
        ('rewards.functions=["broken.py:early"]', ["broken.py", "nothing_of_that_name"]),
        ('rewards.functions=["mine.py:late"]', ["late", "early"]),
        ('rewards.functions=["mine.py:three"]', ["three", "columns"]),
        ('rewards.functions=["mine.py:short"]', ["mine.py:short", "1 values for 3 samples"]),
        ('rewards.functions=["mine.py:words"]', ["mine.py:words", "'good'", "float or None"]),
        ('rewards.functions=["mine.py:raises"]', ["mine.py:raises", "KeyError", "difficulty"]),
        ('rewards.functions=["corectness"]', ["correctness"]),
        ("rollouts.group_size=1", ["group of one"]),
        ("rollouts.top_p=0.9", ["top_p"]),
        ("rollouts.max_new_tokens=600", ["context of 512", "max_new_tokens"]),
        ("task.few_shot=[{question='q', reasoning='r'}]", ["few_shot", "answer"]),
        ("task.parameters={min_terms=2}", ["parameters", "reasoning_gym"]),
        ("adapter.start_from=nowhere", ["nowhere", "not an adapter"]),
    ],
)
def test_what_cannot_work_is_one_line_before_the_weights_load(
    refused: Any, tiny_model: Path, setting: str, words: list[str]
) -> None:
    line = refused(*arguments(tiny_model), "--set", setting)
    assert all(word in line for word in words), line


def test_tasks_that_cannot_be_used(refused: Any, tiny_model: Path, place: Path) -> None:
    (place / "open.jsonl").write_text('{"prompt": "Say 1.", "answer": "1"}\n{"prompt": "Say something."}\n')
    line = refused(*arguments(tiny_model), "--task", "open.jsonl")
    assert "open.jsonl:2" in line and "without an answer" in line
    (place / "long.jsonl").write_text(
        "".join(json.dumps({"prompt": "word " * 400 + str(n), "answer": "1"}) + "\n" for n in range(20))
    )
    line = refused(*arguments(tiny_model), "--task", "long.jsonl")
    assert "context of 512" in line and "long.jsonl:" in line
    assert "chain_sum" in refused(*arguments(tiny_model), "--task", "chain_sun")


def test_models_that_cannot_be_sampled_from(refused: Any, tiny_model: Path, place: Path) -> None:
    model = place / "model"
    shutil.copytree(tiny_model, model)
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    (model / "chat_template.jinja").write_text(
        template + "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        tree = json.loads((model / name).read_text())
        tree.pop("eos_token_id", None)
        tree.pop("eos_token", None)
        tree.pop("chat_template", None)
        (model / name).write_text(json.dumps(tree))
    line = refused(*arguments(model))
    assert "stop" in line or "end" in line, line
    shutil.rmtree(model)
    shutil.copytree(tiny_model, model)
    template = (model / "chat_template.jinja").read_text()
    opened = template.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<reasoning>{% endif")
    assert opened != template
    (model / "chat_template.jinja").write_text(opened)
    line = refused(*arguments(model))
    assert "reasoning" in line, line


STAGES = """
[adapter]
rank = 4
alpha = 8
[model]
precision = "float32"
[task]
name = "tasks.jsonl"
system_prompt = ""

[[stage]]
name = "format"
kind = "sft"
data.demonstrations = 20
data.validation_share = 0.2
rendering.max_length = 128
optimizer.learning_rate = 0.01
max_steps = 3

[[stage]]
name = "reinforce"
kind = "grpo"
rewards.functions = ["mine.py:early"]
rollouts.group_size = 4
rollouts.max_new_tokens = 8
optimizer.learning_rate = 0.01
max_steps = 6
evaluation_tasks = 0
watchdog_steps = 99
objective.beta = 0.0
run.checkpoint_every_steps = 2

[[stage]]
name = "measure"
kind = "eval"
tasks = 4
max_new_tokens = 8
"""


def test_stages_run_resume_and_end_in_one_table(instep: Any, tiny_model: Path, place: Path) -> None:
    (place / "stages.toml").write_text(STAGES)
    command = ["run", "stages.toml", "--model", str(tiny_model), "--run", "run"]
    listed = instep(*command, "--dry-run").stdout.splitlines()
    assert [line.split(":")[0] for line in listed] == ["1-format", "2-reinforce", "3-measure"]
    assert not (place / "run").exists()
    process = start(place, command)
    wait_for_steps(place / "run" / "2-reinforce", 3, process)
    process.kill()
    process.communicate()
    assert (place / "run" / "1-format" / "summary.json").is_file()
    result = instep(*command)  # the same command goes on
    assert "1-format: finished already" in result.stderr and "going on after step" in result.stderr
    assert "accuracy" in result.stdout and "reinforce" in result.stdout
    summary = json.loads((place / "run" / "summary.json").read_text())
    assert summary["finished"] and [one["skipped"] for one in summary["stages"]] == [True, False, False]
    assert list(summary["evaluation"]["results"]) == ["base", "format", "reinforce"]
    # Reinforcement began where the warm-up ended: its first adapter is the warm-up's, moved a little.
    warm, both = (load_file(place / "run" / name / "adapter" / "adapter_model.safetensors")
                  for name in ("1-format", "2-reinforce"))  # fmt: skip
    fresh = json.loads(instep(
        "grpo", "--config", "run/2-reinforce/config.toml", "--set", "adapter.start_from=run/1-format",
        "--set", "optimizer.learning_rate=1e-12", "--set", "max_steps=1", "--run", "still", "--json",
    ).stdout)  # fmt: skip
    assert fresh["finished"]
    still = load_file(place / "still" / "adapter" / "adapter_model.safetensors")
    for name, value in warm.items():
        np.testing.assert_allclose(still[name], value, atol=1e-7)
        assert not np.array_equal(both[name], value)
    last = instep(*command).stderr
    assert "3-measure: finished already" in last
    other = instep(*command, "--set", "adapter.rank=8", check=2).stderr
    assert "adapter.rank cannot change" in other
