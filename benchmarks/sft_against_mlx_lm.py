"""Supervised fine-tuning on MLX, instep against mlx-lm's own step, measured in pairs in one run on this machine.

    python benchmarks/sft_against_mlx_lm.py --data SESSION [--model FOLDER] [--parts 1 2] [--json FILE]

Part 1: identical rows of 512, 1,024 and 2,048 tokens, a quarter supervised, float32, with and without gradient
checkpointing. Part 2: the session as each side lays it out: mlx-lm on one row per assistant turn, instep on windows.

Every measurement is a fresh process, the two sides alternate, and both read the same token ids from disk. On Linux,
preload an optimised BLAS (docs/mlx.md): as shipped, MLX's matrix product there is about 50 times too slow.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness
import pairs
import recipes
from harness import Part

from instep.config import DEFAULT_MODEL
from instep.engines.mlx.loading import rope_settings
from instep.models import read_config, resolve

SIDES = {"mlx-lm": "mlx_lm_sft.py", "instep": "instep_sft.py"}
LENGTHS = (512, 1024, 2048)
CHECKPOINTED = 2048
"""The length that is measured with gradient checkpointing too."""
SPEED, PEAK_SHARE, SESSION_SPEED = 1.15, 0.6, 8.0
MAX_LENGTH = 2048


def run(side: str, python: Path, job: dict[str, Any]) -> dict[str, Any]:
    return pairs.worker(side, python, SIDES[side], job)


def job_of(model: Path, rows: Path, steps: int, checkpointing: bool) -> dict[str, Any]:
    settings = {"mlx_model_config": rope_settings(read_config(str(model)))}
    return pairs.sft_job(model, rows, steps, "mlx", checkpointing) | settings


def identical_rows(
    python: Path,
    model: Path,
    data: Path,
    work: Path,
    lengths: list[tuple[int, bool]],
    steps: int,
    repeats: int,
) -> Part:
    part = Part(
        "Identical rows, the last quarter supervised, float32",
        ["tokens", "checkpointing", "side", "tokens/s", "peak GB", "first loss"],
        [],
    )
    for length, checkpointing in lengths:
        path = pairs.write_row(work / f"row-{length}.jsonl", model, data, length)
        runs: pairs.Runs = {side: [] for side in SIDES}
        for _, side in harness.interleaved(list(SIDES), repeats):
            runs[side].append(run(side, python, job_of(model, path, steps, checkpointing)))
        _add(part, length, checkpointing, runs)
    part.remarks.append(
        f"{repeats} run(s) a side, {steps} steps each, the first left out; medians, highest peak"
    )
    return part


def _add(part: Part, length: int, checkpointing: bool, runs: pairs.Runs) -> None:
    losses = pairs.check_first_losses(runs, "mlx-lm")
    for side, found in runs.items():
        part.rows.append(
            [
                f"{length:,}",
                "yes" if checkpointing else "no",
                side,
                f"{pairs.speed(found):.1f}",
                f"{pairs.peak(found) / 1e9:.2f}",
                f"{losses[side]:.4f}",
            ]
        )
    where = f"{length:,} tokens{', checkpointing' if checkpointing else ''}"
    ratio = pairs.speed(runs["instep"]) / pairs.speed(runs["mlx-lm"])
    share = pairs.peak(runs["instep"]) / pairs.peak(runs["mlx-lm"])
    if checkpointing:
        part.remarks.append(harness.verdict(f"peak against mlx-lm, {where}", share, PEAK_SHARE, at_most=True))
        part.remarks.append(f"tokens/s against mlx-lm, {where}: {ratio:.3f}")
    else:
        part.remarks.append(harness.verdict(f"tokens/s against mlx-lm, {where}", ratio, SPEED, at_most=False))
        part.remarks.append(f"peak against mlx-lm, {where}: {share:.3f}")
    part.data[where] = runs


def real_session(python: Path, model: Path, data: Path, work: Path, steps: int, repeats: int) -> Part:
    windows = recipes.windowed(recipes.settings(model, data, MAX_LENGTH, 0.0, 1, 0))
    turns = recipes.turn_rows(model, data, windows.train.samples, MAX_LENGTH)
    paths = {
        "mlx-lm": harness.write_rows(work / "turns.jsonl", recipes.shuffled(turns.rows, 0)),
        "instep": harness.write_rows(work / "windows.jsonl", map(recipes.row_of, windows.train.samples)),
    }
    runs: pairs.Runs = {side: [] for side in SIDES}
    for _, side in harness.interleaved(list(SIDES), repeats):
        job = job_of(model, paths[side], steps, False) | {"pack": side == "instep", "max_length": MAX_LENGTH}
        runs[side].append(run(side, python, job))
    rates = {side: _whole(found) for side, found in runs.items()}
    part = Part(
        f"The session at {MAX_LENGTH:,} tokens: one row per turn (mlx-lm) against windows (instep)",
        ["side", "rows", "turns dropped", "supervised/s", "peak GB"],
        [
            ["mlx-lm", f"{len(turns.rows)}", f"{turns.dropped} of {turns.turns}", f"{rates['mlx-lm']:.2f}"],
            ["instep", f"{len(windows.train.samples)}", f"0 of {turns.turns}", f"{rates['instep']:.2f}"],
        ],
    )
    for row, side in zip(part.rows, SIDES, strict=True):
        row.append(f"{pairs.peak(runs[side]) / 1e9:.2f}")
    part.remarks = [
        harness.verdict(
            "supervised tokens/s against one row per turn",
            rates["instep"] / rates["mlx-lm"],
            SESSION_SPEED,
            at_most=False,
        ),
        f"{repeats} run(s) a side, {steps} rows each, the first left out; all supervised tokens over all seconds",
    ]
    part.data = {"runs": runs}
    return part


def _whole(runs: list[dict[str, Any]]) -> float:
    steps = [step for found in runs for step in found["steps"][1:]]
    return sum(step["supervised_tokens"] for step in steps) / sum(step["seconds"] for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a long session file")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="local folder or Hub id")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="without checkpointing")
    parser.add_argument(
        "--checkpointed", type=int, nargs="*", default=[CHECKPOINTED], help="with checkpointing"
    )
    parser.add_argument("--steps", type=int, default=4, help="steps a run, the first left out (default: 4)")
    parser.add_argument("--session-steps", type=int, default=7, help="part 2: rows a run (default: 7)")
    parser.add_argument("--repeats", type=int, default=1, help="runs a side (default: 1)")
    parser.add_argument("--work", type=Path, default=harness.default_work_folder())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    harness.end_on_sigterm()
    model, work = resolve(wanted.model).resolve(), wanted.work.resolve() / "sft-against-mlx-lm"
    python = harness.own_python(wanted.work, "mlx,grpo")  # both sides' packages
    before = harness.begin()
    parts: list[Part] = []
    for number in wanted.parts:
        if number == 1:
            lengths = [(length, False) for length in wanted.lengths] + [
                (length, True) for length in wanted.checkpointed
            ]
            parts.append(
                identical_rows(python, model, wanted.data, work, lengths, wanted.steps, wanted.repeats)
            )
        else:
            parts.append(real_session(python, model, wanted.data, work, wanted.session_steps, wanted.repeats))
        print(parts[-1].text(), flush=True)
    harness.finish(before, parts, wanted.json, harness.versions("mlx", "mlx-lm"))


if __name__ == "__main__":
    main()
