"""Time and memory of one step of the PyTorch engine on rows of random tokens.

    python benchmarks/torch_step.py MODEL [--lengths 512,1024,2048,4096] [--decode] [--json]

Each measurement is a process of its own, because a peak of resident memory is one of a process. A quarter of
the tokens is supervised, in turns of 64, up to the row's end; batch 1 × accumulate `--rows`, LoRA rank 16 on all
seven projections. `above_weights` is the peak of resident memory above what was resident after loading.
`--parts` adds seconds by part, by torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import numpy as np

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines import create
from instep.engines.base import Sampling
from instep.objectives import CrossEntropy
from instep.records import Batch

PARTS = {
    "matrix products": ("aten::mm", "aten::addmm_", "aten::addmm", "aten::bmm", "aten::_softmax"),
    "flash attention forward": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
}


def row(length: int, vocabulary: int, seed: int) -> Batch:
    """One row of random tokens; of every 256 the last 64 are supervised."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, (1, length)).astype(np.int32)
    target = np.array([t for t in range(1, length) if t % 256 >= 192], np.int32)
    position = np.arange(length, dtype=np.int32)[None]
    weight = np.ones(len(target), np.float32)
    return Batch(tokens, np.ones_like(tokens), position, target - 1, tokens[0, target], weight)


def measure(arguments: argparse.Namespace) -> dict[str, float | int | bool | str | None]:
    """One length in this process: a warm-up row, then whole optimizer steps."""
    engine = create("torch")
    settings = ModelSettings(
        path=arguments.model, gradient_checkpointing=arguments.checkpointing, precision=arguments.precision
    )
    report = engine.load(settings, AdapterSettings(), OptimizerSettings(), 0)
    loss = CrossEntropy()
    engine.forward_backward(row(256, 1000, 0), loss)
    engine.zero_gradient()
    before = engine.memory().resident_bytes
    engine.reset_peak()
    rows = [row(arguments.length, 1000, seed) for seed in range(arguments.rows)]
    started = time.perf_counter()
    weight = sum(engine.forward_backward(batch, loss)["weight"] for batch in rows)
    engine.optim_step(1e-4, weight)
    seconds = time.perf_counter() - started
    peak = engine.memory().peak_bytes
    tokens = sum(batch.real_tokens for batch in rows)
    return {
        "length": arguments.length,
        "checkpointing": arguments.checkpointing,
        "precision": report.precision,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "supervised_per_second": round(weight / seconds, 1),
        "peak_gb": None if peak is None else round(peak / 1e9, 3),
        "above_weights_gb": None if peak is None else round((peak - before) / 1e9, 3),
    }


def parts(arguments: argparse.Namespace) -> None:
    """Print the operators that one row spends its time in."""
    import torch

    engine = create("torch")
    settings = ModelSettings(path=arguments.model, precision=arguments.precision)
    engine.load(settings, AdapterSettings(), OptimizerSettings(), 0)
    batch = row(arguments.length, 1000, 0)
    engine.forward_backward(batch, CrossEntropy())
    with torch.profiler.profile() as profile:
        engine.forward_backward(batch, CrossEntropy())
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))


def decode(arguments: argparse.Namespace) -> dict[str, float]:
    """16 rows of 64 new tokens after one shared prompt of 130, without a stop token."""
    engine = create("torch")
    settings = ModelSettings(path=arguments.model, precision=arguments.precision)
    engine.load(settings, AdapterSettings(), OptimizerSettings(), 0)
    prompt = np.random.default_rng(0).integers(0, 1000, 130).astype(np.int32)
    engine.generate([prompt], 16, Sampling(4))
    started = time.perf_counter()
    engine.generate([prompt], 16, Sampling(1))
    first = time.perf_counter()
    engine.generate([prompt], 16, Sampling(65))
    prefill, whole = first - started, time.perf_counter() - first
    step = (whole - prefill) / 64
    return {
        "prefill_seconds": round(prefill, 3),
        "step_seconds": round(step, 4),
        "tokens_per_second": 16 / step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--lengths", default="512,1024,2048,4096")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.length and arguments.parts:
        return parts(arguments)
    if arguments.length:
        return print(json.dumps(measure(arguments)), flush=True)
    if arguments.decode:
        return print(json.dumps(decode(arguments)), flush=True)
    command = [sys.executable, __file__, arguments.model, "--rows", str(arguments.rows)]
    command += ["--precision", arguments.precision]
    for length in arguments.lengths.split(","):
        for extra in ([], ["--checkpointing"]):
            subprocess.run([*command, "--length", length, *extra], check=True)
    return None


if __name__ == "__main__":
    main()
