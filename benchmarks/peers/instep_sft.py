"""instep's side of the SFT benchmark, on the same rows. Runs under the Python that instep is installed in.

Usage: python instep_sft.py JOB.json RESULT.json (see `harness.run_worker`); the job's `task` names a function.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np

from instep import engines
from instep.adapters import load_adapter, save_adapter
from instep.batching import collate, make_order
from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.base import Engine, EngineState, LoadReport
from instep.objectives import CrossEntropy
from instep.records import Sample

TOUCHED_TOKENS = 64


def samples_of(path: str) -> list[Sample]:
    return [
        Sample(np.array(row.tokens, np.int32), np.array(row.supervised, np.float32))
        for row in harness.read_rows(Path(path))
    ]


def adapter_settings(job: dict[str, Any]) -> AdapterSettings:
    return AdapterSettings(rank=job["rank"], alpha=job["alpha"], target_modules=tuple(job["target_modules"]))


def loaded(job: dict[str, Any]) -> tuple[Engine, LoadReport]:
    engine = engines.create(job.get("engine", "torch"))
    model = ModelSettings(
        path=job["model"],
        precision=job.get("precision", "bfloat16"),
        quantization=job.get("quantization", "none"),
        device="cpu",
        gradient_checkpointing=job["gradient_checkpointing"],
    )
    optimizer = OptimizerSettings(
        learning_rate=job["learning_rate"],
        schedule="constant",
        warmup_share=0.0,
        weight_decay=0.0,
        clip_norm=1.0,
    )
    return engine, engine.load(model, adapter_settings(job), optimizer, job["seed"])


def step(engine: Engine, rows: Sequence[Sequence[Sample]], learning_rate: float) -> tuple[float, int, int]:
    """One optimizer step, one row per micro-batch. Returns (mean loss, tokens, supervised tokens)."""
    loss = weight = 0.0
    tokens = supervised = 0
    for row in rows:
        batch = collate([row], engine.shape_rules())
        sums = engine.forward_backward(batch, CrossEntropy())
        loss, weight = loss + sums["loss"], weight + sums["weight"]
        tokens, supervised = tokens + batch.real_tokens, supervised + batch.supervised_tokens
    if not engine.optim_step(learning_rate, weight).applied:
        raise RuntimeError("a step was not finite")
    return loss / weight, tokens, supervised


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train on `rows`, for `steps` or, where that is null, for `seconds`; the adapter of the last step within
    the budget is saved to `adapter`. With `pack` the rows are samples that instep packs and orders itself;
    without it they are taken as they are, in their order."""
    samples = samples_of(job["rows"])
    began = time.perf_counter()
    with harness.sampled_peak() as load_peak:
        engine, report = loaded(job)
    load_seconds = time.perf_counter() - began
    resident = harness.resident_bytes()
    order = make_order(samples, job["max_length"], job["pack"], job["rows_per_step"], job["seed"])

    def rows_of(number: int) -> list[list[Sample]]:
        if job["pack"]:
            return [[samples[index] for index in row] for row in order.step(number)]
        first = number * job["rows_per_step"]
        return [[samples[(first + place) % len(samples)]] for place in range(job["rows_per_step"])]

    log = harness.StepLog()
    kept, kept_steps = engine.state(), 0
    log.begin()
    while len(log.steps) != job["steps"]:
        log.end_step(*step(engine, rows_of(len(log.steps)), job["learning_rate"]))
        if job["seconds"] is not None:
            if log.seconds > job["seconds"]:
                break
            kept, kept_steps = engine.state(), len(log.steps)
    # The engine lets the kernel's high-water mark start again when it has loaded, hence the sampled one.
    peak = max(load_peak.bytes, harness.peak_resident_bytes())
    if job["seconds"] is None:
        kept, kept_steps = engine.state(), len(log.steps)
    if job["adapter"]:
        save_adapter(job["adapter"], kept, adapter_settings(job), job["model"], replace=True)
    return {
        "versions": harness.versions(*harness.INSTEP_PACKAGES),
        "settings": report.choices | {"weights": report.precision},
        "trainable_parameters": report.trainable_parameters,
        "load_seconds": load_seconds,
        "steps": log.as_json(),
        "adapter_steps": kept_steps,
        "resident_after_load_bytes": resident,
        "peak_resident_bytes": peak,
    }


def held_out_loss(engine: Engine, samples: Sequence[Sample], adapter: bool) -> float:
    """Mean loss over the supervised tokens, in nats."""
    loss = weight = 0.0
    for sample in samples:
        batch = collate([[sample]], engine.shape_rules())
        logprob = engine.score(batch, adapter=adapter).logprob.astype(np.float64)
        loss -= float(np.dot(batch.weight.astype(np.float64), logprob))
        weight += batch.weight_sum
    return loss / weight


def evaluate(job: dict[str, Any]) -> dict[str, Any]:
    """The held-out loss on `rows` of the base model and under each PEFT adapter of `adapters` (name → folder)."""
    engine, _ = loaded(job)
    samples = samples_of(job["rows"])
    losses = {"base": held_out_loss(engine, samples, adapter=False)}
    own = engine.state()
    for name, folder in job["adapters"].items():
        parameters, settings = load_adapter(folder)
        wanted = adapter_settings(job)
        if (settings.rank, settings.alpha) != (wanted.rank, wanted.alpha):
            raise RuntimeError(f"{folder}: rank {settings.rank}, alpha {settings.alpha}, not as asked for")
        zeros = {key: np.zeros_like(value) for key, value in own.parameters.items()}
        engine.load_state(EngineState(parameters, zeros, zeros, 0))
        losses[name] = held_out_loss(engine, samples, adapter=True)
    return {"losses": losses, "supervised_tokens": sum(int((s.weight > 0).sum()) for s in samples)}


def peak(job: dict[str, Any]) -> dict[str, Any]:
    """Memory of `steps` whole steps: resident, above what is resident with the weights loaded and touched once, and
    by the engine's own count.

    At least two, because the first one allocates what the later ones keep (gradients, optimizer moments). Weights
    may be mapped from their file and become resident only when they are read, hence the touch.
    """
    engine, report = loaded(job)
    rows = samples_of(job["rows"])
    first = rows[0]
    weight = np.zeros(TOUCHED_TOKENS, np.float32)
    weight[-1] = 1.0
    engine.score(collate([[Sample(first.tokens[:TOUCHED_TOKENS], weight)]], engine.shape_rules()))
    base = harness.resident_bytes()
    engine.reset_peak()
    if not harness.reset_peak_resident():
        raise RuntimeError("this system cannot reset the peak of resident memory (Linux can)")
    losses = [step(engine, [[row] for row in rows], job["learning_rate"])[0] for _ in range(job["steps"])]
    return {
        "losses": losses,
        "weight_bytes": report.weight_bytes,
        "peak_allocated_bytes": engine.memory().peak_bytes,
        "resident_with_weights_bytes": base,
        "peak_resident_bytes": harness.peak_resident_bytes(),
        "tokens": sum(len(row) for row in rows),
    }


TASKS = {"train": train, "evaluate": evaluate, "peak": peak}

if __name__ == "__main__":
    harness.answer(lambda job: TASKS[job["task"]](job))
