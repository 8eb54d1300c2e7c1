"""The SFT loop on this engine: it learns, and what the compiler took is logged apart."""

from __future__ import annotations

import numpy as np
from jax_engines import load

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.jax.engine import JaxEngine
from instep.engines.torch.engine import TorchEngine
from instep.loops.listener import StopFlag
from instep.runs.checkpoint import load_checkpoint
from instep.runs.metrics import read_metrics
from tests.loops.test_sft_loop import SETTINGS, make_loop


def test_a_run_learns_logs_its_compilation_and_leaves_a_checkpoint_for_any_engine(family, tmp_path):
    settings = SETTINGS.model_copy(
        update={
            "model": ModelSettings(path=str(family("llama")), device="cpu", head_chunk=13),
            "adapter": AdapterSettings(rank=4, alpha=8.0),
            "optimizer": OptimizerSettings(learning_rate=0.02),
        }
    )
    loop = make_loop(tmp_path / "run", JaxEngine(), settings)
    assert loop.train(StopFlag())
    progress = loop.progress
    assert progress.last_validation["loss"] < 0.8 * progress.first_validation["loss"]
    steps = [record for record in read_metrics(loop.run.metrics) if record["kind"] == "train"]
    assert steps[0]["seconds_compile"] > 0
    assert sum(record["seconds_compile"] == 0 for record in steps) >= len(steps) - 4
    state = load_checkpoint(loop.run.checkpoint("last"))[0]
    other = load(TorchEngine(), family("llama"), warm=False)
    other.load_state(state)
    for name, value in other.state().exp_avg_sq.items():
        np.testing.assert_array_equal(value, loop.engine.state().exp_avg_sq[name])
