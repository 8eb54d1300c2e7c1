"""A run that goes on with another engine: the same run, within the rounding of float32."""

from __future__ import annotations

import importlib.util
import shutil
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instep.config import SftSettings
from instep.engines import ENGINES
from instep.loops.run import resumed_settings
from instep.loops.sft_run import run_sft
from instep.runs.checkpoint import load_checkpoint
from instep.runs.metrics import read_metrics

HALF, WHOLE = 5, 10
THERE = [name for name, known in ENGINES.items() if importlib.util.find_spec(known.package)]


class Silent:
    def note(self, text: str) -> None: ...
    def metrics(self, record: dict[str, Any], remaining_seconds: float | None) -> None: ...
    def phase(self, name: str, done: int, total: int) -> None: ...


def settings(model: Path, data: Path, folder: Path, engine: str, steps: int) -> SftSettings:
    return SftSettings.model_validate(
        {
            "engine": engine,
            "model": {"path": str(model), "precision": "float32", "device": "cpu"},
            "data": {"path": str(data), "validation_share": 0.2},
            "rendering": {"max_length": 192},
            "optimizer": {"schedule": "constant", "warmup_share": 0.0, "learning_rate": 1e-3},
            "rows_per_step": 2,
            "epochs": 20,
            "max_steps": steps,
            "run": {"folder": str(folder), "keep_awake": False},
            "tracking": {"tracker": "none"},
        }
    )


@pytest.fixture(scope="module")
def halves(tiny_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory):
    """half(engine) → the folder of a run of HALF steps on it, made once."""
    made: dict[str, Path] = {}

    def get(engine: str) -> Path:
        if engine not in made:
            made[engine] = tmp_path_factory.mktemp(engine) / "run"
            run_sft(settings(tiny_model, chats, made[engine], engine, HALF), Silent())
        return made[engine]

    return get


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_sft(settings(tiny_model, chats, folder, "torch", WHOLE), Silent())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), permutations(THERE, 2))
def test_a_run_goes_on_with_another_engine(
    halves, uninterrupted: Path, tmp_path: Path, first: str, second: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(halves(first), folder)
    going_on = resumed_settings(SftSettings, folder, {"engine": second, "max_steps": WHOLE})
    summary = run_sft(going_on, Silent(), resume=True)
    assert summary["engine"] == second and summary["steps"] == WHOLE
    ours, theirs = (
        [record["loss"] for record in read_metrics(path / "metrics.jsonl") if record["kind"] == "train"]
        for path in (folder, uninterrupted)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-3)
    state, whole = (load_checkpoint(path / "checkpoints" / "last")[0] for path in (folder, uninterrupted))
    assert state.step == whole.step == WHOLE
    for group in ("parameters", "exp_avg", "exp_avg_sq"):
        a, b = (
            np.concatenate([getattr(one, group)[name].ravel() for name in sorted(whole.parameters)])
            for one in (state, whole)
        )
        assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b), group
