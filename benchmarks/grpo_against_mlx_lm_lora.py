"""GRPO on MLX, instep against mlx-lm-lora, measured in pairs in one run on this machine.

    python benchmarks/grpo_against_mlx_lm_lora.py [--gsm8k FOLDER] [--model FOLDER] [--json FILE]

The same work as `grpo_against_trl.py`: a step is 2 prompts × 8 completions of 64 tokens sampled, scored, credited and
trained on, with a KL term, in float32; instep runs each layer again in the backward pass
(`model.gradient_checkpointing`). mlx-lm-lora runs in an environment of its own
(`peers/requirements-mlx-lm-lora.txt`). On Linux, preload an optimised BLAS for both (docs/mlx.md).
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
from instep.engines.mlx.loading import rope_settings
from instep.models import read_config, resolve

SIDES = {"mlx-lm-lora": "mlx_lm_lora_grpo.py", "instep": "instep_grpo.py"}
PROMPTS_PER_STEP, LENGTH = grpo_against_trl.PROMPTS_PER_STEP, 300
TARGETS = pairs.Targets(rate=2.5, peak_share=0.5)


def measure(
    pythons: dict[str, Path], model: Path, work: Path, gsm8k: str | None, steps: int, repeats: int
) -> Part:
    made = prompts.of_length(model, gsm8k, LENGTH, PROMPTS_PER_STEP * steps + 1)
    path = prompts.write(work / f"prompts-{LENGTH}.jsonl", made[:-1])
    prompts.write(path.with_suffix(".held-out.jsonl"), made[-1:])
    job = grpo_against_trl.job(model, path, steps, 0) | {
        "engine": "mlx",
        "precision": "float32",
        "gradient_checkpointing": True,
        "mlx_model_config": rope_settings(read_config(str(model))),
    }
    runs: pairs.Runs = {side: [] for side in SIDES}
    for _, side in harness.interleaved(list(SIDES), repeats):
        runs[side].append(pairs.worker(side, pythons[side], SIDES[side], job))
    grpo_against_trl.check_same_work(runs)
    title = f"{PROMPTS_PER_STEP} prompts of {LENGTH} tokens × 8 completions of 64 tokens, β 0.04, float32"
    return pairs.grpo_part(title, "mlx-lm-lora", runs, TARGETS, {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", help="folder with GSM8K's train.jsonl and test.jsonl; else from the Hub")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="local folder or Hub id")
    parser.add_argument("--steps", type=int, default=4, help="steps a run, the first left out (default: 4)")
    parser.add_argument("--repeats", type=int, default=1, help="runs a side (default: 1)")
    parser.add_argument("--work", type=Path, default=harness.default_work_folder())
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    wanted = parser.parse_args()
    harness.end_on_sigterm()
    peer = harness.peer_python(wanted.work, harness.PEERS / "requirements-mlx-lm-lora.txt")
    pythons = {"mlx-lm-lora": peer, "instep": harness.own_python(wanted.work, "mlx,grpo")}
    model, work = resolve(wanted.model).resolve(), wanted.work.resolve() / "grpo-against-mlx-lm-lora"
    before = harness.begin()
    part = measure(pythons, model, work, wanted.gsm8k, wanted.steps, wanted.repeats)
    print(part.text(), flush=True)
    peers = harness.versions_of(peer, "mlx-lm-lora", "mlx", "mlx-lm")
    harness.finish(before, [part], wanted.json, peers)


if __name__ == "__main__":
    main()
