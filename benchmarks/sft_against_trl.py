"""Supervised fine-tuning, instep against TRL's SFTTrainer, measured in pairs in one run on this machine.

    python benchmarks/sft_against_trl.py --data SESSION [--model FOLDER] [--parts 1 2 3] [--json FILE]

Part 1: identical rows of at most 2,048 tokens, speed and peak memory, with and without gradient checkpointing.
Part 2: equal wall time at 4,096 tokens, TRL on one row per assistant turn against instep's windows, held-out loss.
Part 3: how instep's peak memory grows from 1,024 to 4,096 tokens with gradient checkpointing.

Every measurement is a fresh process, the two sides alternate, and both read the same token ids from disk. TRL
runs in an environment of its own (`peers/requirements-trl.txt`), made on the first run. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness
import recipes
from harness import Part

from instep.config import DEFAULT_MODEL, LINEAR_LAYERS
from instep.models import resolve

GIGABYTE = 1e9
ROW_LENGTH, ROW_COUNT, SUPERVISED_SHARE = 2048, 12, 0.25
WARM_UP_STEPS = 1
LOSS_AGREES = 1e-2
SHORT, LONG = 1024, 4096
SIDES = ("TRL", "instep")


@dataclass(frozen=True)
class Bench:
    """The two sides, and what both are given."""

    model: Path
    data: Path
    work: Path
    python: Path
    rows_per_step: int
    seed: int

    def job(self, **changes: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "task": "train",
            "model": str(self.model),
            "rows_per_step": self.rows_per_step,
            "learning_rate": 2e-4,
            "rank": 16,
            "alpha": 32,
            "target_modules": list(LINEAR_LAYERS),
            "gradient_checkpointing": False,
            "autocast": False,
            "steps": None,
            "seconds": None,
            "pack": False,
            "adapter": None,
            "seed": self.seed,
        }
        return settings | changes

    def run(self, side: str, job: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        if side == "TRL":
            result = harness.run_worker(self.python, harness.PEERS / "trl_sft.py", job, {})
        else:
            result = harness.run_worker(sys.executable, harness.PEERS / "instep_sft.py", job, {})
        print(f"  {side} {job['task']}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        return result


# -- part 1: identical rows -------------------------------------------------------------------------------


def identical_rows(bench: Bench, steps: int, repeats: int) -> Part:
    windows = recipes.windowed(
        recipes.settings(bench.model, bench.data, ROW_LENGTH, 0.0, bench.rows_per_step, bench.seed)
    )
    rows = recipes.rows_with_share(windows.train.samples, ROW_COUNT, SUPERVISED_SHARE)
    path = harness.write_rows(bench.work / "identical-rows.jsonl", rows)
    runs: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for checkpointing in (False, True):
        for _, side in harness.interleaved(SIDES, repeats):
            job = bench.job(
                rows=str(path), max_length=ROW_LENGTH, steps=steps, gradient_checkpointing=checkpointing
            )
            runs.setdefault((side, checkpointing), []).append(bench.run(side, job))
    check_same_work(runs)
    part = Part(
        f"Identical rows of at most {ROW_LENGTH:,} tokens",
        ["side", "checkpointing", "tokens/s", "tokens/cpu-s", "supervised/s", "peak GB", "first loss"],
        [_identical_line(side, checkpointing, found) for (side, checkpointing), found in runs.items()],
    )
    tokens, supervised = sum(len(r.tokens) for r in rows), sum(r.supervised_tokens for r in rows)
    part.remarks.append(
        f"{len(rows)} rows, {tokens:,} tokens, {supervised / tokens:.0%} supervised; {repeats} run(s) a side, "
        f"{steps} steps of {bench.rows_per_step} rows each, the first {WARM_UP_STEPS} left out; medians, highest peak"
    )
    for checkpointing in (False, True):
        label = "with checkpointing" if checkpointing else "without checkpointing"
        speed = {side: _speed(runs[side, checkpointing]) for side in SIDES}
        peaks = {side: _peak(runs[side, checkpointing]) for side in SIDES}
        part.remarks.append(
            harness.verdict(
                f"tokens/s against TRL, {label}", speed["instep"] / speed["TRL"], 1.4, at_most=False
            )
        )
        part.remarks.append(
            harness.verdict(
                f"peak memory against TRL, {label}", peaks["instep"] / peaks["TRL"], 0.6, at_most=True
            )
        )
    part.remarks.append(f"settings: {_settings(runs)}")
    part.data = {
        "tokens": tokens,
        "supervised_tokens": supervised,
        "runs": [
            {"side": side, "gradient_checkpointing": checkpointing, **run}
            for (side, checkpointing), found in runs.items()
            for run in found
        ],
    }
    return part


def check_same_work(runs: dict[tuple[str, bool], list[dict[str, Any]]]) -> None:
    """Both sides must have taken the loss on the same tokens, and start from the same loss (B is zero, so the
    adapters do not matter there). Raises RuntimeError where the comparison would mean nothing."""
    everything = [run for found in runs.values() for run in found]
    work = {tuple((s["tokens"], s["supervised_tokens"]) for s in run["steps"]) for run in everything}
    if len(work) != 1:
        raise RuntimeError(f"the sides did not process the same tokens, per step: {sorted(work)}")
    first = [run["steps"][0]["loss"] for run in everything]
    if max(first) - min(first) > LOSS_AGREES:
        raise RuntimeError(f"the sides do not start from the same loss: {first}")
    parameters = {run["trainable_parameters"] for run in everything}
    if len(parameters) != 1:
        raise RuntimeError(f"the sides do not train as many parameters: {parameters}")


def _measured(runs: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [step for run in runs for step in run["steps"][WARM_UP_STEPS:]]


def _speed(runs: list[dict[str, Any]]) -> float:
    return statistics.median(step["tokens"] / step["seconds"] for step in _measured(runs))


def _peak(runs: list[dict[str, Any]]) -> float:
    return max(run["peak_resident_bytes"] for run in runs)


def _identical_line(side: str, checkpointing: bool, runs: list[dict[str, Any]]) -> list[str]:
    steps = _measured(runs)
    return [
        side,
        "yes" if checkpointing else "no",
        f"{_speed(runs):.0f}",
        f"{statistics.median(s['tokens'] / s['cpu_seconds'] for s in steps):.0f}",
        f"{statistics.median(s['supervised_tokens'] / s['seconds'] for s in steps):.1f}",
        f"{_peak(runs) / GIGABYTE:.2f}",
        f"{runs[0]['steps'][0]['loss']:.4f}",
    ]


def _settings(runs: dict[tuple[str, bool], list[dict[str, Any]]]) -> str:
    last = {side: found[0]["settings"] for (side, _), found in runs.items()}
    return "; ".join(
        f"{side}: " + ", ".join(f"{name} {value}" for name, value in settings.items())
        for side, settings in last.items()
    )


# -- part 2: equal wall time ------------------------------------------------------------------------------


def equal_time(bench: Bench, minutes: float, max_length: int, held_out_share: float) -> Part:
    data = recipes.windowed(
        recipes.settings(bench.model, bench.data, max_length, held_out_share, bench.rows_per_step, bench.seed)
    )
    turns = recipes.turn_rows(bench.model, bench.data, data.train.samples, max_length)
    rows = {
        "TRL": recipes.shuffled(turns.rows, bench.seed),
        "instep": [recipes.row_of(sample) for sample in data.train.samples],
    }
    held_out = harness.write_rows(
        bench.work / "held-out.jsonl", [recipes.row_of(sample) for sample in data.validation.samples]
    )
    runs: dict[str, dict[str, Any]] = {}
    for _, side in harness.interleaved(SIDES, 1):
        job = bench.job(
            rows=str(harness.write_rows(bench.work / f"equal-time-{side}.jsonl", rows[side])),
            max_length=max_length,
            seconds=minutes * 60,
            pack=side == "instep",
            adapter=str(bench.work / f"adapter-{side}"),
        )
        runs[side] = bench.run(side, job)
        if not runs[side]["adapter_steps"]:
            raise RuntimeError(f"no update of {side} ended within {minutes:g} minutes: give more --minutes")
    job = bench.job(
        task="evaluate",
        rows=str(held_out),
        max_length=max_length,
        adapters={side: str(bench.work / f"adapter-{side}") for side in SIDES},
    )
    scored = bench.run("instep", job)
    part = Part(
        f"Equal wall time, {minutes:g} minutes each, at most {max_length:,} tokens a row",
        ["side and rows", "tokens/s", "supervised/s", "processed per supervised", "updates", "held-out loss"],
        [
            ["before training", "", "", "", "", f"{scored['losses']['base']:.4f}"],
            _timed_line("TRL", "TRL, one row per turn", rows, runs, scored),
            _timed_line("instep", "instep, windows", rows, runs, scored),
        ],
    )
    part.remarks = _timed_remarks(data, turns, rows, runs, scored)
    part.data = {"runs": runs, "held_out": scored, "turns": turns.turns, "dropped_turns": turns.dropped}
    return part


def _rate(run: dict[str, Any], of: str) -> float:
    """Over the updates that count, which are the ones that were over within the time."""
    steps = run["steps"][: run["adapter_steps"]]
    return sum(step[of] for step in steps) / sum(step["seconds"] for step in steps)


def _cost(rows: list[harness.Row]) -> float:
    """Processed tokens per supervised token, over all rows of the recipe."""
    return sum(len(row.tokens) for row in rows) / sum(row.supervised_tokens for row in rows)


def _timed_line(
    side: str,
    label: str,
    rows: dict[str, list[harness.Row]],
    runs: dict[str, dict[str, Any]],
    scored: dict[str, Any],
) -> list[str]:
    return [
        label,
        f"{_rate(runs[side], 'tokens'):.0f}",
        f"{_rate(runs[side], 'supervised_tokens'):.1f}",
        f"{_cost(rows[side]):.2f}",
        str(runs[side]["adapter_steps"]),
        f"{scored['losses'][side]:.4f}",
    ]


def _timed_remarks(
    data: Any,
    turns: recipes.TurnRows,
    rows: dict[str, list[harness.Row]],
    runs: dict[str, dict[str, Any]],
    scored: dict[str, Any],
) -> list[str]:
    losses = scored["losses"]
    report = data.train.report
    dropped = {why: n for why, n in report["dropped_turns"].items()}
    speed = _rate(runs["instep"], "supervised_tokens") / _rate(runs["TRL"], "supervised_tokens")
    return [
        f"one row per turn drops {turns.dropped} of {turns.turns} supervised turns as too long; the windows none "
        f"({report['supervised_turns']} of {report['assistant_turns']} assistant turns are supervised, the others: "
        f"{', '.join(f'{n} {why}' for why, n in dropped.items()) or 'none'})",
        f"held out: the last part of the session, {len(data.validation.samples)} windows with "
        f"{scored['supervised_tokens']:,} supervised tokens, sharing none with training; scored by instep's engine "
        "for both adapters",
        "updates are those that ended within the time; the adapter is the one after the last of them",
        harness.verdict(
            "processed tokens per supervised token, instep", _cost(rows["instep"]), 2.8, at_most=True
        ),
        harness.verdict("supervised tokens/s against TRL's one row per turn", speed, 8.0, at_most=False),
        f"held-out loss, instep against TRL: {losses['instep']:.4f} against {losses['TRL']:.4f} "
        f"(target lower: {'met' if losses['instep'] < losses['TRL'] else 'MISSED'})",
    ]


# -- part 3: memory by length -----------------------------------------------------------------------------


def memory_by_length(bench: Bench, repeats: int) -> Part:
    above: dict[int, list[float]] = {SHORT: [], LONG: []}
    runs = []
    for _, length in harness.interleaved([SHORT, LONG], repeats):
        row = recipes.row_of_length(bench.model, bench.data, length)
        path = harness.write_rows(bench.work / f"length-{length}.jsonl", [row])
        result = bench.run("instep", bench.job(task="peak", rows=str(path), gradient_checkpointing=True))
        above[length].append(result["peak_resident_bytes"] - result["resident_with_weights_bytes"])
        runs.append(result)
    highest = {length: max(found) for length, found in above.items()}
    part = Part(
        "instep with gradient checkpointing: peak of a whole step above the loaded weights",
        ["tokens in the row", "peak above weights, GB"],
        [[f"{length:,}", f"{value / GIGABYTE:.3f}"] for length, value in highest.items()],
        [
            harness.verdict(
                f"growth from {SHORT:,} to {LONG:,} tokens", highest[LONG] / highest[SHORT], 4.5, at_most=True
            ),
            "gradients and optimizer moments are counted as above the weights; each length is a fresh process",
        ],
    )
    part.data = {"runs": runs}
    return part


# -- the command ------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a session file, long enough for the rows")
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="local folder or Hub id (default: %(default)s)"
    )
    parser.add_argument("--parts", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument(
        "--steps", type=int, default=4, help="part 1: steps a run, the first left out (default: 4)"
    )
    parser.add_argument("--repeats", type=int, default=2, help="parts 1 and 3: runs a side (default: 2)")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="part 2: training time a side (default: 5)"
    )
    parser.add_argument("--max-length", type=int, default=4096, help="part 2: tokens a row (default: 4096)")
    parser.add_argument("--held-out-share", type=float, default=0.15, help="part 2 (default: 0.15)")
    parser.add_argument("--rows-per-step", type=int, default=4, help="rows of one update (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, default=harness.default_work_folder(), help="environments and rows"
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    if wanted.steps <= WARM_UP_STEPS or wanted.repeats < 1 or wanted.minutes <= 0:
        parser.error(f"--steps must be above {WARM_UP_STEPS}, --repeats at least 1, --minutes above 0")
    if not wanted.data.exists():
        parser.error(f"--data: {wanted.data} does not exist")
    return wanted


def main() -> None:
    harness.end_on_sigterm()
    wanted = arguments()
    python = harness.peer_python(wanted.work, harness.PEERS / "requirements-trl.txt")
    bench = Bench(
        resolve(wanted.model).resolve(),
        wanted.data.resolve(),
        wanted.work.resolve() / "sft-against-trl",
        python,
        wanted.rows_per_step,
        wanted.seed,
    )
    before = harness.begin()
    parts: list[Part] = []
    for number in sorted(set(wanted.parts)):
        if number == 1:
            parts.append(identical_rows(bench, wanted.steps, wanted.repeats))
        elif number == 2:
            parts.append(equal_time(bench, wanted.minutes, wanted.max_length, wanted.held_out_share))
        else:
            parts.append(memory_by_length(bench, wanted.repeats))
        print(parts[-1].text(), flush=True)
    harness.finish(before, parts, wanted.json, harness.versions_of(python, *harness.TRL_PACKAGES))


if __name__ == "__main__":
    main()
