"""Supervised fine-tuning on MLX, instep against mlx-lm's own step, measured in pairs in one run on this machine.

    python benchmarks/sft_against_mlx_lm.py --data SESSION [--model FOLDER] [--parts 1 2] [--json FILE]

Part 1: identical rows of 512, 1,024 and 2,048 tokens, a quarter supervised, float32, with and without gradient
checkpointing. Part 2: the session as each side lays it out: mlx-lm on one row per assistant turn, instep on windows.

Every measurement is a fresh process, the two sides alternate, and both read the same token ids from disk. On Linux,
preload an optimised BLAS (docs/mlx.md): as shipped, MLX's matrix product there is about 50 times too slow.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness
import recipes
from harness import Part, Row

from instep.config import DEFAULT_MODEL, LINEAR_LAYERS
from instep.engines.mlx.loading import rope_settings
from instep.models import read_config, resolve

SIDES = ("mlx-lm", "instep")
LENGTHS = (512, 1024, 2048)
CHECKPOINTED = 2048
"""The length that is measured with gradient checkpointing too."""
SPEED, PEAK_SHARE, SESSION_SPEED = 1.15, 0.6, 8.0
LOSS_AGREES = 1e-3
MAX_LENGTH = 2048


def run(side: str, python: Path, job: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    script = "mlx_lm_sft.py" if side == "mlx-lm" else "instep_sft.py"
    result = harness.run_worker(python, harness.PEERS / script, job, {})
    print(f"  {side}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return result


def job_of(model: Path, rows: Path, steps: int, checkpointing: bool) -> dict[str, Any]:
    return {
        "task": "train",
        "engine": "mlx",
        "precision": "float32",
        "model": str(model),
        "mlx_model_config": rope_settings(read_config(str(model))),
        "rows": str(rows),
        "max_length": 8192,
        "rows_per_step": 1,
        "learning_rate": 2e-4,
        "rank": 16,
        "alpha": 32,
        "target_modules": list(LINEAR_LAYERS),
        "gradient_checkpointing": checkpointing,
        "steps": steps,
        "seconds": None,
        "pack": False,
        "adapter": None,
        "seed": 0,
    }


def speed(runs: list[dict[str, Any]], of: str = "tokens") -> float:
    """Median over the steps after the first (it compiles) of tokens a second."""
    return statistics.median(step[of] / step["seconds"] for found in runs for step in found["steps"][1:])


def peak(runs: list[dict[str, Any]]) -> float:
    return max(found["peak_resident_bytes"] for found in runs)


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
        whole = recipes.row_of_length(model, data, length)
        marks = [place >= length - length // 4 for place in range(length)]
        path = harness.write_rows(work / f"row-{length}.jsonl", [Row(whole.tokens, marks)])
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _, side in harness.interleaved(SIDES, repeats):
            runs[side].append(run(side, python, job_of(model, path, steps, checkpointing)))
        _add(part, length, checkpointing, runs)
    part.remarks.append(
        f"{repeats} run(s) a side, {steps} steps each, the first left out; medians, highest peak"
    )
    return part


def _add(part: Part, length: int, checkpointing: bool, runs: dict[str, list[dict[str, Any]]]) -> None:
    losses = {side: found[0]["steps"][0]["loss"] for side, found in runs.items()}
    if abs(losses["instep"] - losses["mlx-lm"]) > LOSS_AGREES * losses["mlx-lm"]:
        raise RuntimeError(f"the first losses are {losses}: the sides do not take the same step")
    for side, found in runs.items():
        part.rows.append(
            [
                f"{length:,}",
                "yes" if checkpointing else "no",
                side,
                f"{speed(found):.1f}",
                f"{peak(found) / 1e9:.2f}",
                f"{losses[side]:.4f}",
            ]
        )
    where = f"{length:,} tokens{', checkpointing' if checkpointing else ''}"
    ratio = speed(runs["instep"]) / speed(runs["mlx-lm"])
    share = peak(runs["instep"]) / peak(runs["mlx-lm"])
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
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _, side in harness.interleaved(SIDES, repeats):
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
        row.append(f"{peak(runs[side]) / 1e9:.2f}")
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
