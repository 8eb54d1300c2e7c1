"""Does the reward teach anything? `instep grpo` on one recipe, once a seed, with held-out accuracy before and after.

    python benchmarks/grpo_learning.py [--config chain_sum] [--seeds 0 1 2] [--json FILE]

Each run is the command that a user would give, in a fresh process and folder, evaluations included in its wall time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness
from harness import Part

from instep.evaluation import wilson_interval
from instep.runs.folder import METRICS
from instep.runs.metrics import read_metrics

METRIC = "reward/correctness"
GAIN, MINUTES = 0.20, 15.0


def one_run(config: str, seed: int, model: str | None, extra: list[str], folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "instep", "grpo", "--config", config, "--set", f"seed={seed}"]
    command += ["--run", str(folder), "--json"]
    command += ["--model", model] if model else []
    for setting in extra:
        command += ["--set", setting]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}")
    summary = json.loads(done.stdout)
    records = list(read_metrics(folder / METRICS))
    held_out = [record for record in records if record["kind"] == "validation"]
    return {
        "seed": seed,
        "wall_seconds": time.perf_counter() - began,
        "summary": summary,
        "before": held_out[0],
        "after": held_out[-1],
        "train": [record for record in records if record["kind"] == "train"],
    }


def _share(record: dict[str, Any]) -> str:
    low, high = wilson_interval(record[METRIC] * record["tasks"], record["tasks"])
    return f"{record[METRIC]:.3f} ({low:.2f}–{high:.2f})"


def table(config: str, runs: list[dict[str, Any]]) -> Part:
    rows = []
    for run in runs:
        summary, train = run["summary"], run["train"]
        rows.append(
            [
                str(run["seed"]),
                f"{summary['steps']}",
                f"{summary['rollouts']:,}",
                f"{run['wall_seconds'] / 60:.1f}",
                _share(run["before"]),
                _share(run["after"]),
                f"{run['after'][METRIC] - run['before'][METRIC]:+.3f}",
                f"{sum(r['reward'] for r in train[:10]) / len(train[:10]):.2f} → "
                f"{sum(r['reward'] for r in train[-10:]) / len(train[-10:]):.2f}",
            ]
        )
    part = Part(
        f"recipe {config}: held-out accuracy, greedy, before and after",
        [
            "seed",
            "steps",
            "completions",
            "wall minutes",
            "before",
            "after",
            "gain",
            "reward, first and last 10",
        ],
        rows,
    )
    gains = [run["after"][METRIC] - run["before"][METRIC] for run in runs]
    part.remarks = [
        harness.verdict("smallest gain in held-out accuracy", min(gains), GAIN, at_most=False),
        harness.verdict(
            "longest run in minutes", max(run["wall_seconds"] for run in runs) / 60, MINUTES, at_most=True
        ),
        f"{runs[0]['after']['tasks']} held-out tasks, the same for every seed; Wilson intervals of 95 %",
    ]
    part.data = {"runs": runs}
    return part


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="chain_sum", help="recipe or TOML file (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--model", help="local folder or Hub id in the place of the recipe's")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="any setting; repeatable"
    )
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    return parser.parse_args()


def main() -> None:
    harness.end_on_sigterm()
    wanted = arguments()
    before = harness.begin()
    runs = []
    with tempfile.TemporaryDirectory(prefix="instep-learning-") as folder:
        for seed in wanted.seeds:
            place = Path(folder) / f"seed-{seed}"
            runs.append(one_run(wanted.config, seed, wanted.model, wanted.set, place))
            print(table(wanted.config, runs).text(), flush=True)
    harness.finish(before, [table(wanted.config, runs)], wanted.json)


if __name__ == "__main__":
    main()
