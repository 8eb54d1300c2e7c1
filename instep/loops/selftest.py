"""`instep selftest`: an engine on this machine's own device against a CPU, and what it measures there."""

from __future__ import annotations

import importlib.util
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from instep import engines
from instep.batching import collate
from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.base import Engine, LoadReport, Sampling
from instep.objectives import CrossEntropy
from instep.records import Sample

STEPS = 3
LENGTHS = (96, 64, 48)
NEW_TOKENS = 24
LOSS, LOGPROB, GRADIENT = 1e-4, 1e-3, 1e-3
"""Relative; absolute nats; relative, of the whole adapter. All in float32."""
LOW_PRECISION_LOSS = 0.03


@dataclass(frozen=True)
class Trace:
    """What one engine gave on the same weights and batches. `gradient` is of the first step, by name."""

    losses: list[float]
    logprob: np.ndarray
    gradient: dict[str, np.ndarray]
    norm: float
    """Of that gradient, before it is clipped (`gradient` is after)."""
    greedy: list[int]


@dataclass(frozen=True)
class Check:
    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return bool(np.isfinite(self.value)) and self.value <= self.limit


@dataclass
class Report:
    machine: str
    versions: dict[str, str]
    device: str
    choices: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def markdown(self) -> str:
        """The report to paste into an issue."""
        lines = [f"- machine: {self.machine}", f"- device: {self.device}"]
        lines.append("- versions: " + ", ".join(f"{name} {value}" for name, value in self.versions.items()))
        lines += [f"- {name}: {value}" for name, value in self.choices.items()]
        lines += ["", "| check | value | at most | |", "| --- | ---: | ---: | --- |"]
        for check in self.checks:
            verdict = "passed" if check.passed else "FAILED"
            lines.append(f"| {check.name} | {check.value:.1e} | {check.limit:.0e} | {verdict} |")
        lines += ["", "| measured | |", "| --- | ---: |"]
        lines += [f"| {name} | {value} |" for name, value in self.figures.items()]
        return "\n".join(lines)


def samples_of(vocabulary: int) -> list[Sample]:
    """Random conversations, half of their tokens supervised: the same on every machine."""
    rng = np.random.default_rng(11)
    found = []
    for length in LENGTHS:
        weight = (rng.random(length) < 0.5).astype(np.float32)
        weight[0], weight[-1] = 0.0, 1.0
        found.append(Sample(rng.integers(10, min(vocabulary, 1000), length).astype(np.int32), weight))
    return found


def loaded(name: str, folder: Path, device: str, precision: str) -> tuple[Engine, LoadReport]:
    """An engine with the model and a fresh adapter. Raises InputError."""
    engine = engines.create(name)
    model = ModelSettings.model_validate({"path": str(folder), "device": device, "precision": precision})
    return engine, engine.load(model, AdapterSettings(), OptimizerSettings(), 0)


def trace(engine: Engine, samples: list[Sample]) -> Trace:
    """Three steps on packed rows; the gradient is read from Adam's first moment, (1 − β₁)·g after one step."""
    batch = collate([samples[:2], samples[2:]], engine.shape_rules())
    real = batch.weight > 0
    logprob = engine.score(batch).logprob[real]
    losses, gradient, norm = [], {}, 0.0
    for step in range(STEPS):
        sums = engine.forward_backward(batch, CrossEntropy())
        losses.append(sums["loss"] / sums["weight"])
        report = engine.optim_step(1e-3, sums["weight"])
        if step == 0:
            norm = report.gradient_norm
            gradient = {
                name: value / (1 - OptimizerSettings().beta1)
                for name, value in engine.state().exp_avg.items()
            }
    prompt = samples[0].tokens[:32]
    (rollout,) = engine.generate([prompt], 1, Sampling(NEW_TOKENS, temperature=0.0), adapter=False)[0]
    return Trace(losses, logprob, gradient, norm, rollout.tokens.tolist())


def compare(name: str, ours: Trace, reference: Trace) -> list[Check]:
    """The invariant "same weights and batch → same loss, log-probabilities and gradient", measured."""
    flat = [
        np.concatenate([values[key].ravel() for key in sorted(reference.gradient)])
        for values in (ours.gradient, reference.gradient)
    ]
    loss = max(abs(a - b) / abs(b) for a, b in zip(ours.losses, reference.losses, strict=True))
    different = sum(a != b for a, b in zip(ours.greedy, reference.greedy, strict=False))
    return [
        Check(f"loss of {STEPS} steps, {name} (relative)", loss, LOSS),
        Check(
            f"log-probabilities, {name} (nats)",
            float(np.abs(ours.logprob - reference.logprob).max()),
            LOGPROB,
        ),
        Check(
            f"adapter gradient, {name} (relative)",
            float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])),
            GRADIENT,
        ),
        Check(f"greedy tokens of {NEW_TOKENS} that differ, {name}", float(different), 0.0),
    ]


def measure(engine: Engine, samples: list[Sample], length: int) -> dict[str, str]:
    """Tokens a second of a step on one row and of decoding, and memory. Compilation is left out."""
    rng = np.random.default_rng(5)
    weight = (np.arange(length) % 4 == 3).astype(np.float32)
    row = Sample(rng.integers(10, 1000, length).astype(np.int32), weight)
    batch = collate([[row]], engine.shape_rules())

    def step() -> None:
        sums = engine.forward_backward(batch, CrossEntropy())
        engine.optim_step(1e-4, sums["weight"])

    step()
    engine.reset_peak()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    memory = engine.memory()
    prompt = samples[0].tokens
    began = time.perf_counter()
    rollouts = engine.generate([prompt], 8, Sampling(NEW_TOKENS, seed=1))[0]
    decode = sum(len(rollout.tokens) for rollout in rollouts) / (time.perf_counter() - began)
    figures = {
        f"training step, 1 × {length} tokens": f"{length / seconds:,.0f} tokens/s",
        f"sampling, 8 completions of {NEW_TOKENS}": f"{decode:,.0f} tokens/s",
    }
    for what, value in (
        ("live", memory.live_bytes),
        ("peak of a step", memory.peak_bytes),
        ("driver", memory.driver_bytes),
    ):
        if value is not None:
            figures[f"memory, {what}"] = f"{value / 1e9:.2f} GB"
    return figures


def run_selftest(name: str, folder: Path, length: int, say: Callable[[str], None]) -> Report:
    """Compare the engine on its own device with itself on the CPU, and with the PyTorch engine where that is
    installed; then measure. Raises InputError where the engine or the model cannot be loaded."""
    say(f"{name} on the CPU, float32")
    engine, cpu = loaded(name, folder, "cpu", "float32")
    samples = samples_of(1000)
    reference = trace(engine, samples)
    del engine
    own, own_report = loaded(name, folder, "auto", "auto")
    report = Report(
        machine=f"{platform.machine()}, {platform.system()} {platform.release()}",
        versions=_versions(name),
        device=f"{own_report.device} in {own_report.precision}",
        choices=own_report.choices,
    )
    if name != "torch" and importlib.util.find_spec("torch"):
        say("the PyTorch engine on the CPU, float32")
        other, _ = loaded("torch", folder, "cpu", "float32")
        report.checks += compare(f"{name} against torch, both on the CPU", reference, trace(other, samples))
        del other
    if own_report.device != cpu.device:
        say(f"{name} on {own_report.device}, float32")
        engine, _ = loaded(name, folder, "auto", "float32")
        report.checks += compare(f"{own_report.device} against CPU", trace(engine, samples), reference)
        del engine
    if own_report.precision != "float32":
        say(f"{name} on {own_report.device}, {own_report.precision}")
        lower = trace(own, samples)
        apart = max(abs(a - b) / abs(b) for a, b in zip(lower.losses, reference.losses, strict=True))
        report.checks.append(
            Check(f"loss of {STEPS} steps, {own_report.precision} (relative)", apart, LOW_PRECISION_LOSS)
        )
    say("speed and memory")
    report.figures = measure(own, samples, length)
    return report


def _versions(name: str) -> dict[str, str]:
    packages: dict[str, Any] = {"mlx": ("mlx", "mlx-lm"), "torch": ("torch",), "jax": ("jax", "optax")}
    wanted = ("instep", *packages.get(name, ()), "transformers", "numpy")
    return {"python": platform.python_version()} | {one: metadata.version(one) for one in wanted}
