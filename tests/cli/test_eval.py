"""`instep eval` as a user runs it, on a real (tiny) model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


FEW = ["--n", "3", "--max-new-tokens", "6", "--set", "task.system_prompt="]


def test_a_run_is_measured_beside_its_base_model_and_the_result_is_kept(
    instep: Any, tiny_model: Path, chats: Path, tasks: Path, tmp_path: Path
) -> None:
    sets = [
        "max_steps=2",
        "rendering.max_length=192",
        "optimizer.learning_rate=0.05",
        "data.validation_share=0",
    ]
    more = [part for setting in sets for part in ("--set", setting)]
    instep("sft", "--model", tiny_model, "--data", chats, "--run", "run", *more)
    line = instep("eval", "run", *FEW, check=2).stderr
    assert "give --task" in line
    shown = instep("eval", "run", "--task", tasks, *FEW, "--samples", "2", "--k", "1,2")
    for words in ("tasks/test accuracy", "base", "adapter", "greedy", "sampled", "pass at 2", "interval"):
        assert words in shown.stdout, shown.stdout
    (file,) = (tmp_path / "run" / "evaluations").glob("*-tasks.json")
    stored = json.loads(file.read_text())
    assert stored["settings"]["max_new_tokens"] == 6 and stored["tasks"] == 3
    assert set(stored["results"]) == {"base", "adapter"}
    rows = [json.loads(line) for line in file.with_suffix(".completions.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 3 * (1 + 2)
    by_model = {
        model: [r["completion"] for r in rows if (r["model"], r["mode"]) == (model, "greedy")]
        for model in ("base", "adapter")
    }
    assert by_model["base"] != by_model["adapter"]
    alone = instep("eval", tiny_model, "--task", tasks, *FEW, "--json", "-o", "alone.json")
    result = json.loads(alone.stdout)
    assert result["file"] == "alone.json" and list(result["results"]) == ["model"]
    # The base column is the model itself: nothing of the adapter is left on.
    kept = (tmp_path / "alone.completions.jsonl").read_text().splitlines()
    assert [json.loads(line)["completion"] for line in kept] == by_model["base"]
    refused = instep("eval", tiny_model, "--task", tasks, *FEW, "-o", "alone.json", check=2)
    assert "never overwritten" in refused.stderr


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "give --task"),
        (["--task", "chain_sun"], "chain_sum"),
        (["--task", "chain_sum", "--k", "1,x"], "--k '1,x'"),
        (["--task", "chain_sum", "--k", "4"], "k = 4"),
        (["--task", "chain_sum", "--temperature", "0.5"], "temperature is set but would not be used"),
        (["--task", "chain_sum", "--set", "nonsense=1"], "nonsense"),
        (["--task", "chain_sum", "--max-new-tokens", "4000"], "context of 512"),
    ],
)
def test_bad_input_is_one_line(
    tiny_model: Path,
    tmp_path: Path,
    more: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import sys

    from instep.cli.app import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["instep", "eval", str(tiny_model), *more])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error.replace("\n", " ") and "Traceback" not in error
    assert not list(tmp_path.iterdir())
