"""Tunix's side of the SFT benchmark: the compiled step of its PeftTrainer, with its own loss.

Usage: python tunix_sft.py JOB.json RESULT.json (see `harness.run_worker`). Runs under the peer's Python.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import tunix_model
from tunix.sft import peft_trainer, utils


def inputs(example: peft_trainer.TrainingInput) -> dict[str, Any]:
    """Rows have no padding, whatever ids they hold."""
    real = jnp.ones_like(example.input_tokens, bool)
    return {
        "input_tokens": example.input_tokens,
        "input_mask": example.input_mask,
        "positions": utils.build_positions_from_mask(real),
        "attention_mask": utils.make_causal_attn_mask(real),
    }


def train(job: dict[str, Any]) -> dict[str, Any]:
    rows = harness.read_rows(Path(job["rows"]))
    with tunix_model.mesh():
        model, trainable = tunix_model.with_adapter(tunix_model.base_model(job["model"]), job)
        trainer = peft_trainer.PeftTrainer(
            model,
            tunix_model.optimizer(job),
            peft_trainer.TrainingConfig(eval_every_n_steps=1_000_000, max_steps=job["steps"]),
        ).with_gen_model_input_fn(inputs)
        step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)
        resident = harness.resident_bytes()
        log = harness.StepLog()
        log.begin()
        began = time.perf_counter()
        for number in range(job["steps"]):
            row = rows[number % len(rows)]
            example = peft_trainer.TrainingInput(
                input_tokens=jnp.array([row.tokens]), input_mask=jnp.array([row.supervised])
            )
            loss, _, norm = step(example)
            jax.block_until_ready((loss, norm))
            log.end_step(float(loss), len(row.tokens), row.supervised_tokens)
    return {
        "versions": harness.versions(*tunix_model.PACKAGES),
        "settings": {"weights": "float32", "rematerialisation": "none"},
        "trainable_parameters": trainable,
        "seconds": time.perf_counter() - began,
        "steps": log.as_json(),
        "resident_after_load_bytes": resident,
        "peak_resident_bytes": harness.peak_resident_bytes(),
    }


if __name__ == "__main__":
    harness.answer(train)
