"""QLoRA on MLX: what quantized weights weigh, and what a training step needs above them.

    python benchmarks/qlora_on_mlx.py --data SESSION [--model FOLDER] [--tokens 1024] [--json FILE]

Each precision is a fresh process that takes the same steps on the same row. On Linux, preload an optimised BLAS
(docs/mlx.md).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness
import pairs
from harness import Part

from instep.config import DEFAULT_MODEL
from instep.models import resolve

QUANTIZATIONS = ("none", "8bit", "4bit")
WEIGHT_BYTES = 100e6
"""At most, of SmolLM2-135M at 4 bits."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a long session file")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="local folder or Hub id")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the row (default: 1024)")
    parser.add_argument("--steps", type=int, default=4, help="steps on it (default: 4)")
    parser.add_argument("--work", type=Path, default=harness.default_work_folder())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    harness.end_on_sigterm()
    model, work = resolve(wanted.model).resolve(), wanted.work.resolve() / "qlora-on-mlx"
    python = harness.own_python(wanted.work, "mlx,grpo")
    before = harness.begin()
    row = pairs.write_row(work / f"row-{wanted.tokens}.jsonl", model, wanted.data, wanted.tokens)
    found = {}
    for name in QUANTIZATIONS:
        job = pairs.sft_job(model, row, wanted.steps, "mlx") | {"task": "peak", "quantization": name}
        found[name] = pairs.worker(name, python, "instep_sft.py", job)
    part = Part(
        f"{wanted.steps} steps on one row of {wanted.tokens:,} tokens, activations float32",
        ["quantization", "weights MB", "peak above weights MB", "first loss", "last loss"],
        [],
    )
    above = {name: one["peak_allocated_bytes"] - one["weight_bytes"] for name, one in found.items()}
    for name, one in found.items():
        numbers = [one["weight_bytes"] / 1e6, above[name] / 1e6]
        losses = [one["losses"][0], one["losses"][-1]]
        part.rows.append([name, *(f"{n:.0f}" for n in numbers), *(f"{loss:.4f}" for loss in losses)])
    part.remarks = [
        harness.verdict(
            "weights at 4 bits, MB", found["4bit"]["weight_bytes"] / 1e6, WEIGHT_BYTES / 1e6, True
        ),
        *(
            harness.verdict(
                f"peak above weights at {name} against float32", above[name] / above["none"], 1.0, True
            )
            for name in QUANTIZATIONS[1:]
        ),
        "by MLX's own count of allocated bytes",
    ]
    part.data = {"runs": found}
    print(part.text(), flush=True)
    harness.finish(before, [part], wanted.json)


if __name__ == "__main__":
    main()
