"""Do the engines take the same step? The same weights and rows on each, in float32 on the CPU, against PyTorch's.

    python benchmarks/parity.py --data SESSION [--model FOLDER ...] [--engines mlx jax] [--json FILE]

Windows of a real session, two rows of packed samples a batch: log-probabilities, loss, adapter gradient (read from
Adam's first moment after one step), greedy tokens, and the loss of 20 steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness
import recipes
from harness import Part

from instep import engines
from instep.batching import collate
from instep.config import DEFAULT_MODEL, AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.base import Sampling
from instep.models import resolve
from instep.objectives import CrossEntropy
from instep.records import Batch, Sample

LOGPROB, LOSS, GRADIENT, CURVE = 5e-4, 1e-4, 1e-4, 1e-3
"""Nats; relative; relative, of the whole adapter; relative, at every step."""
NEW_TOKENS = 32


def trace(name: str, model: Path, batches: list[list[Sample]], steps: int) -> dict[str, Any]:
    engine = engines.create(name)
    settings = ModelSettings(path=str(model), precision="float32", device="cpu")
    engine.load(settings, AdapterSettings(), OptimizerSettings(), 0)
    state = engine.state()
    rng = np.random.default_rng(1)
    for key in sorted(state.parameters):  # B is zero at first, which would leave A without gradient
        if "lora_B" in key:
            value = state.parameters[key]
            value[...] = 0.01 * rng.standard_normal(value.shape)
    engine.load_state(state)
    rules = engine.shape_rules()
    half = len(batches[0]) // 2

    def batch_of(step: int) -> Batch:
        rows = batches[step % len(batches)]
        return collate([rows[:half], rows[half:]], rules)

    first = batch_of(0)
    found: dict[str, Any] = {"logprob": engine.score(first).logprob[first.weight > 0], "losses": []}
    for step in range(steps):
        batch = batch_of(step)
        sums = engine.forward_backward(batch, CrossEntropy())
        found["losses"].append(sums["loss"] / sums["weight"])
        engine.optim_step(2e-4, sums["weight"])
        if step == 0:
            found["gradient"] = engine.state().exp_avg
    prompt = batches[0][0].tokens[:64]
    sampling = Sampling(NEW_TOKENS, temperature=0.0)
    found["greedy"] = engine.generate([prompt], 1, sampling, adapter=False)[0][0].tokens.tolist()
    return found


def distances(ours: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    a, b = (
        np.concatenate([found["gradient"][key].ravel() for key in sorted(reference["gradient"])])
        for found in (ours, reference)
    )
    relative = [abs(x - y) / abs(y) for x, y in zip(ours["losses"], reference["losses"], strict=True)]
    return {
        "log-probabilities (nats)": float(np.abs(ours["logprob"] - reference["logprob"]).max()),
        "loss (relative)": relative[0],
        "gradient (relative)": float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        "loss curve (relative)": max(relative),
        "greedy tokens that differ": float(
            sum(x != y for x, y in zip(ours["greedy"], reference["greedy"], strict=True))
        ),
    }


LIMITS = {
    "log-probabilities (nats)": LOGPROB,
    "loss (relative)": LOSS,
    "gradient (relative)": GRADIENT,
    "loss curve (relative)": CURVE,
    "greedy tokens that differ": 0.0,
}


def measure(model: Path, data: Path, names: list[str], length: int, steps: int) -> Part:
    windows = recipes.windowed(recipes.settings(model, data, length, 0.0, 1, 0)).train.samples
    chosen = sorted(windows, key=lambda sample: -int((sample.weight > 0).sum()))[:6]
    batches = [chosen[:3], chosen[3:]]
    reference = trace("torch", model, batches, steps)
    part = Part(f"{model.name}: {steps} steps on windows of at most {length} tokens", ["engine", *LIMITS], [])
    for name in names:
        ours = trace(name, model, batches, steps)
        found = distances(ours, reference)
        part.rows.append([name, *(f"{value:.1e}" for value in found.values())])
        part.remarks += [
            f"{name}, {what}: {value:.1e} (at most {LIMITS[what]:.0e}: {'met' if value <= LIMITS[what] else 'MISSED'})"
            for what, value in found.items()
        ]
        part.data[name] = found
    return part


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a session file")
    parser.add_argument("--model", nargs="+", default=[DEFAULT_MODEL], help="local folders or Hub ids")
    parser.add_argument("--engines", nargs="+", default=[name for name in engines.ENGINES if name != "torch"])
    parser.add_argument("--length", type=int, default=192, help="longest window (default: 192)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    harness.end_on_sigterm()
    before = harness.begin()
    parts = []
    for name in wanted.model:
        part = measure(resolve(name).resolve(), wanted.data, wanted.engines, wanted.length, wanted.steps)
        parts.append(part)
        print(part.text(), flush=True)
    harness.finish(before, parts, wanted.json)


if __name__ == "__main__":
    main()
