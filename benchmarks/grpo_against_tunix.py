"""GRPO on JAX, instep against Tunix's GRPOLearner, measured in pairs in one run on this machine.

    python benchmarks/grpo_against_tunix.py [--gsm8k FOLDER] [--model FOLDER] [--json FILE]

A step is 2 prompts × 4 completions of 32 tokens sampled, scored, credited and trained on, with a KL term (β 0.04), in
float32. Prompts have 128 tokens, a power of two, so that Tunix pads nothing. Tunix runs in an environment of its own
(`peers/requirements-tunix.txt`).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import grpo_against_trl
import harness
import pairs
import prompts
from harness import Part

from instep.config import DEFAULT_MODEL
from instep.models import resolve

SIDES = {"Tunix": "tunix_grpo.py", "instep": "instep_grpo.py"}
PROMPTS_PER_STEP, GROUP_SIZE, NEW_TOKENS, LENGTH = grpo_against_trl.PROMPTS_PER_STEP, 4, 32, 128
TARGETS = pairs.Targets(rate=2.0, peak_share=0.3)


def measure(python: Path, model: Path, work: Path, wanted: argparse.Namespace) -> Part:
    made = prompts.of_length(model, wanted.gsm8k, LENGTH, PROMPTS_PER_STEP * wanted.steps + 1)
    path = prompts.write(work / f"prompts-{LENGTH}.jsonl", made[:-1])
    prompts.write(path.with_suffix(".held-out.jsonl"), made[-1:])
    job = grpo_against_trl.job(model, path, wanted.steps, 0) | {
        "engine": "jax",
        "precision": "float32",
        "group_size": GROUP_SIZE,
        "max_new_tokens": NEW_TOKENS,
        "prompt_tokens": LENGTH,
        "micro_batch": wanted.micro_batch,
    }
    runs: pairs.Runs = {side: [] for side in SIDES}
    for _, side in harness.interleaved(list(SIDES), wanted.repeats):
        interpreter = python if side == "Tunix" else sys.executable
        runs[side].append(pairs.worker(side, interpreter, SIDES[side], job))
    grpo_against_trl.check_same_work(runs)
    title = (
        f"{PROMPTS_PER_STEP} prompts of {LENGTH} tokens × {GROUP_SIZE} completions of {NEW_TOKENS} tokens, β 0.04, "
        "float32"
    )
    told = {"Tunix's update": f"{wanted.micro_batch} prompt(s) with their completions a micro-batch"}
    return pairs.grpo_part(title, "Tunix", runs, TARGETS, told)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", help="folder with GSM8K's train.jsonl and test.jsonl; else from the Hub")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="local folder or Hub id of a Llama")
    parser.add_argument("--steps", type=int, default=5, help="steps a run, the first left out (default: 5)")
    parser.add_argument("--repeats", type=int, default=1, help="runs a side (default: 1)")
    parser.add_argument(
        "--micro-batch",
        type=int,
        default=PROMPTS_PER_STEP,
        choices=[1, PROMPTS_PER_STEP],
        help="prompts that Tunix trains on at once (default: all of a step, its own default)",
    )
    parser.add_argument("--work", type=Path, default=harness.default_work_folder())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    harness.end_on_sigterm()
    python = harness.peer_python(wanted.work, harness.PEERS / "requirements-tunix.txt")
    model, work = resolve(wanted.model).resolve(), wanted.work.resolve() / "grpo-against-tunix"
    before = harness.begin()
    part = measure(python, model, work, wanted)
    print(part.text(), flush=True)
    peers = harness.versions_of(python, "google-tunix", "jax", "flax", "qwix")
    harness.finish(before, [part], wanted.json, peers)


if __name__ == "__main__":
    main()
