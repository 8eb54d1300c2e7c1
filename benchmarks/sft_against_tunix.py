"""Supervised fine-tuning on JAX, instep against Tunix's own step, measured in pairs in one run on this machine.

    python benchmarks/sft_against_tunix.py --data SESSION [--model FOLDER] [--lengths 512 1024] [--json FILE]

One row of 512, then of 1,024 tokens, a quarter supervised, float32. Every measurement is a fresh process, the two
sides alternate, and both read the same token ids from disk. Tunix runs in an environment of its own
(`peers/requirements-tunix.txt`), made on the first run.
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

SIDES = {"Tunix": "tunix_sft.py", "instep": "instep_sft.py"}
LENGTHS = (512, 1024)
SPEED, PEAK_SHARE = 1.3, 0.35


def measure(python: Path, model: Path, data: Path, work: Path, wanted: argparse.Namespace) -> Part:
    part = Part(
        "One row a step, the last quarter supervised, float32",
        ["tokens", "side", "tokens/s", "cpu-s/step", "first step s", "peak GB", "first loss"],
        [],
    )
    for length in wanted.lengths:
        row = pairs.write_row(work / f"row-{length}.jsonl", model, data, length)
        job = pairs.sft_job(model, row, wanted.steps, "jax")
        runs: pairs.Runs = {side: [] for side in SIDES}
        for _, side in harness.interleaved(list(SIDES), wanted.repeats):
            interpreter = python if side == "Tunix" else sys.executable
            runs[side].append(pairs.worker(side, interpreter, SIDES[side], job))
        _add(part, length, runs)
    part.remarks.append(
        f"{wanted.repeats} run(s) a side, {wanted.steps} steps each, the first (which compiles) left out; medians, "
        "highest peak"
    )
    return part


def _add(part: Part, length: int, runs: pairs.Runs) -> None:
    losses = pairs.check_first_losses(runs, "Tunix")
    sizes = {side: found[0]["trainable_parameters"] for side, found in runs.items()}
    if len(set(sizes.values())) != 1:
        raise RuntimeError(f"the sides train {sizes} parameters: not the same work")
    for side, found in runs.items():
        part.rows.append(
            [
                f"{length:,}",
                side,
                f"{pairs.speed(found):.1f}",
                f"{pairs.median(found, 'cpu_seconds'):.2f}",
                f"{max(run['steps'][0]['seconds'] for run in found):.1f}",
                f"{pairs.peak(found) / 1e9:.2f}",
                f"{losses[side]:.4f}",
            ]
        )
    rate = pairs.speed(runs["instep"]) / pairs.speed(runs["Tunix"])
    share = pairs.peak(runs["instep"]) / pairs.peak(runs["Tunix"])
    part.remarks += [
        harness.verdict(f"tokens/s against Tunix, {length:,} tokens", rate, SPEED, at_most=False),
        harness.verdict(f"peak against Tunix, {length:,} tokens", share, PEAK_SHARE, at_most=True),
    ]
    part.data[f"{length} tokens"] = runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a long session file")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="local folder or Hub id of a Llama")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--steps", type=int, default=6, help="steps a run, the first left out (default: 6)")
    parser.add_argument("--repeats", type=int, default=1, help="runs a side (default: 1)")
    parser.add_argument("--work", type=Path, default=harness.default_work_folder())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    harness.end_on_sigterm()
    python = harness.peer_python(wanted.work, harness.PEERS / "requirements-tunix.txt")
    model, work = resolve(wanted.model).resolve(), wanted.work.resolve() / "sft-against-tunix"
    before = harness.begin()
    part = measure(python, model, wanted.data, work, wanted)
    print(part.text(), flush=True)
    peers = harness.versions_of(python, "google-tunix", "jax", "flax", "qwix")
    harness.finish(before, [part], wanted.json, peers)


if __name__ == "__main__":
    main()
