"""Four simulated devices give the curve of one; each runs in a process of its own, as XLA's flags are read once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import json, sys
import numpy as np
from batches import batch, samples
from jax_engines import engine
from pathlib import Path
import dataclasses, jax
from instep.engines.base import Sampling
from instep.engines.jax import step
from instep.objectives import CrossEntropy
made = engine(Path(sys.argv[1]), warm=False, quantization=sys.argv[2])
spread = max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(made._weights))
alone = max(leaf.addressable_shards[0].data.nbytes / leaf.nbytes for leaf in
            jax.tree.leaves([made._weights["layers"][n] for n in ("qkv", "o", "gate_up", "down")]))
losses = []
for seed in range(6):
    one = batch([samples([9, 14], seed), samples([20], seed + 50), samples([12], seed + 90)], 32)
    if seed % 2:
        one = dataclasses.replace(one, position=one.position + 5, prefix=np.arange(20, 25, dtype=np.int32))
    sums = made.forward_backward(one, CrossEntropy())
    losses.append(sums["loss"] / sums["weight"])
    assert made.optim_step(1e-2, sums["weight"]).applied
drawn = made.generate([np.arange(5, 16, dtype=np.int32)], 2, Sampling(6, seed=1))
ids = [rollout.tokens.tolist() for rollout in drawn[0]]
programs = step.accumulate.jitted._cache_size()
print(json.dumps({"losses": losses, "ids": ids, "devices": spread, "share": alone, "programs": programs}))
"""
HERE = Path(__file__).parent


def start(folder, devices: int, mesh: str = "", quantization: str = "none", **more: str) -> subprocess.Popen:
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "INSTEP_JAX_MESH": mesh,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parent / "torch"), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), quantization],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment | more,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> dict:
    out, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def run(*arguments, **more) -> dict:
    return finish(start(*arguments, **more))


@pytest.mark.slow
def test_four_devices_give_the_curve_of_one(family):
    """On a mesh of both axes, with a base of 4 bits."""
    one = run(family("gemma3_text"), 1, quantization="4bit")
    assert one["devices"] == 1 and one["programs"] == 2  # with a prefix and without, however many steps
    four = run(family("gemma3_text"), 4, "2x2", "4bit")
    assert four["devices"] == 4 and four["share"] <= 0.5
    np.testing.assert_allclose(four["losses"], one["losses"], rtol=1e-5)
    assert four["ids"] == one["ids"]


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one(family):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    together = [
        start(
            family("llama"), 1,
            JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(index),
        )
        for index in range(2)
    ]  # fmt: skip
    first, second = (finish(process) for process in together)
    one = run(family("llama"), 1)
    assert first == second and first["devices"] == 2
    np.testing.assert_allclose(first["losses"], one["losses"], rtol=1e-5)
    assert first["ids"] == one["ids"]
