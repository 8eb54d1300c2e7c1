"""GRPO, instep against TRL's GRPOTrainer, measured in pairs in one run on this machine.

    python benchmarks/grpo_against_trl.py [--gsm8k FOLDER] [--model FOLDER] [--prompt-tokens 130 300] [--json FILE]

A step is 2 prompts × 8 completions of 64 tokens sampled, scored, credited and trained on, with a KL term (β 0.04).
Every measurement is a fresh process and the two sides alternate. TRL runs in an environment of its own
(`peers/requirements-trl.txt`), made on the first run. See benchmarks/README.md.
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
import prompts
from harness import Part

from instep.config import DEFAULT_MODEL, LINEAR_LAYERS
from instep.models import resolve

SIDES = {"TRL": "trl_grpo.py", "instep": "instep_grpo.py"}
PROMPTS_PER_STEP, GROUP_SIZE, NEW_TOKENS, BETA = 2, 8, 64, 0.04
WARM_UP_STEPS = 1
RATES = {130: 2.5, 300: 3.5}
"""Prompt tokens → the step rate against TRL's that is asked for; other lengths are measured without a target."""
PEAK_SHARE = 0.45
SAMPLED_AGREES = 0.05


def job(model: Path, path: Path, steps: int, seed: int) -> dict[str, Any]:
    return {
        "model": str(model),
        "prompts": str(path),
        "held_out": str(path.with_suffix(".held-out.jsonl")),
        "prompts_per_step": PROMPTS_PER_STEP,
        "group_size": GROUP_SIZE,
        "max_new_tokens": NEW_TOKENS,
        "beta": BETA,
        "learning_rate": 2e-5,
        "rank": 16,
        "alpha": 32,
        "target_modules": list(LINEAR_LAYERS),
        "steps": steps,
        "seed": seed,
    }


def measure(
    length: int, python: Path, model: Path, work: Path, gsm8k: str | None, steps: int, repeats: int, seed: int
) -> Part:
    made = prompts.of_length(model, gsm8k, length, PROMPTS_PER_STEP * steps + 1)
    path = prompts.write(work / f"prompts-{length}.jsonl", made[:-1])
    prompts.write(path.with_suffix(".held-out.jsonl"), made[-1:])
    wanted = job(model, path, steps, seed)
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _, side in harness.interleaved(list(SIDES), repeats):
        began = time.perf_counter()
        interpreter = python if side == "TRL" else sys.executable
        runs[side].append(harness.run_worker(interpreter, harness.PEERS / SIDES[side], wanted, {}))
        print(f"  {side}, prompts of {length} tokens: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    check_same_work(runs)
    return _part(length, runs, steps, repeats)


def _median(runs: list[dict[str, Any]], of: str) -> float:
    return statistics.median(step[of] for run in runs for step in run["steps"][WARM_UP_STEPS:])


def check_same_work(runs: dict[str, list[dict[str, Any]]]) -> None:
    """Both sides must have sampled as many tokens and trained on every group. Raises RuntimeError otherwise."""
    steps = [step for found in runs.values() for run in found for step in run["steps"]]
    if any(step["with_spread"] < 1 for step in steps):
        raise RuntimeError("a group had no spread, so that a side was spared its backward pass")
    sampled = [
        sum(step["sampled_tokens"] for run in found for step in run["steps"]) for found in runs.values()
    ]
    if max(sampled) > min(sampled) * (1 + SAMPLED_AGREES):
        raise RuntimeError(f"the sides sampled {sampled} tokens: not the same work")


def _part(length: int, runs: dict[str, list[dict[str, Any]]], steps: int, repeats: int) -> Part:
    seconds = {side: _median(found, "seconds") for side, found in runs.items()}
    peaks = {side: max(run["peak_resident_bytes"] for run in found) for side, found in runs.items()}
    part = Part(
        f"{PROMPTS_PER_STEP} prompts of {length} tokens × {GROUP_SIZE} completions of {NEW_TOKENS} tokens, β {BETA}",
        ["side", "seconds/step", "cpu-s/step", "sampled tokens/step", "peak GB"],
        [
            [
                side,
                f"{seconds[side]:.2f}",
                f"{_median(found, 'cpu_seconds'):.1f}",
                f"{statistics.mean(step['sampled_tokens'] for run in found for step in run['steps']):.0f}",
                f"{peaks[side] / 1e9:.2f}",
            ]
            for side, found in runs.items()
        ],
    )
    rate, name = seconds["TRL"] / seconds["instep"], "step rate against TRL"
    part.remarks = [
        harness.verdict(name, rate, RATES[length], at_most=False)
        if length in RATES
        else f"{name}: {rate:.3f}",
        harness.verdict("peak memory against TRL", peaks["instep"] / peaks["TRL"], PEAK_SHARE, at_most=True),
        f"instep's step: {_median(runs['instep'], 'seconds_rollouts'):.2f} s of rollouts and rewards, "
        f"{_median(runs['instep'], 'seconds_forward_backward'):.2f} s of reference, forward and backward",
        f"{repeats} run(s) a side, {steps} steps each, the first {WARM_UP_STEPS} left out; medians, highest peak",
        "settings: "
        + "; ".join(
            f"{side}: " + ", ".join(f"{key} {value}" for key, value in found[0]["settings"].items())
            for side, found in runs.items()
        ),
    ]
    part.data = {"runs": runs}
    return part


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", help="folder with GSM8K's train.jsonl and test.jsonl; else from the Hub")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="local folder or Hub id (default: %(default)s)"
    )
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[130, 300])
    parser.add_argument("--steps", type=int, default=5, help="steps a run, the first left out (default: 5)")
    parser.add_argument("--repeats", type=int, default=2, help="runs a side (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, default=harness.default_work_folder(), help="environment and prompts"
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    if wanted.steps <= WARM_UP_STEPS or wanted.repeats < 1:
        parser.error(f"--steps must be above {WARM_UP_STEPS}, --repeats at least 1")
    return wanted


def main() -> None:
    harness.end_on_sigterm()
    wanted = arguments()
    python = harness.peer_python(wanted.work, harness.PEERS / "requirements-trl.txt")
    model, work = resolve(wanted.model).resolve(), wanted.work.resolve() / "grpo-against-trl"
    before = harness.begin()
    parts: list[Part] = []
    for length in wanted.prompt_tokens:
        parts.append(
            measure(length, python, model, work, wanted.gsm8k, wanted.steps, wanted.repeats, wanted.seed)
        )
        print(parts[-1].text(), flush=True)
    harness.finish(before, parts, wanted.json, harness.versions_of(python, *harness.TRL_PACKAGES))


if __name__ == "__main__":
    main()
