"""mlx-lm's side of the SFT benchmark: the step of its trainer, with its own loss. Runs where mlx-lm is installed.

Usage: python mlx_lm_sft.py JOB.json RESULT.json (see `harness.run_worker`).

mlx-lm is given what it needs to be right and quick here: rotary settings that it does not read itself, a float32
copy of the weights, bias-corrected AdamW with the same clipping, and the step compiled as its trainer compiles it.
Its loss knows one supervised stretch a row, so the rows of this benchmark are supervised at their end.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import harness
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

PAD = 32  # mlx-lm pads the batch to a multiple of so many, plus one


def model_of(job: dict[str, Any]) -> Any:
    model, _ = load_model(Path(job["model"]), model_config=job["mlx_model_config"])
    model.set_dtype(mx.float32)
    model.freeze()
    owner = {name: "self_attn" if name[0] in "qkvo" else "mlp" for name in job["target_modules"]}
    lora = {
        "rank": job["rank"],
        "scale": job["alpha"] / job["rank"],
        "dropout": 0.0,
        "keys": [f"{owner[name]}.{name}" for name in job["target_modules"]],
    }
    linear_to_lora_layers(model, len(model.layers), lora)
    if job["gradient_checkpointing"]:
        grad_checkpoint(model.layers[0])
    model.train()
    return model


def train(job: dict[str, Any]) -> dict[str, Any]:
    mx.set_default_device(mx.cpu)
    rows = harness.read_rows(Path(job["rows"]))
    model = model_of(job)
    optimizer = optim.AdamW(job["learning_rate"], weight_decay=0.0, bias_correction=True)
    optimizer.init(model.trainable_parameters())
    mx.eval(model.parameters(), optimizer.state)
    state = [model.state, optimizer.state, mx.random.state]
    loss_and_gradient = nn.value_and_grad(model, default_loss)

    @partial(mx.compile, inputs=state, outputs=state)
    def step(batch: mx.array, lengths: mx.array) -> mx.array:
        (loss, _), gradient = loss_and_gradient(model, batch, lengths)
        gradient, _ = optim.clip_grad_norm(gradient, 1.0)
        optimizer.update(model, gradient)
        return loss

    resident = harness.resident_bytes()
    log = harness.StepLog()
    log.begin()
    began = time.perf_counter()
    for number in range(job["steps"]):
        row = rows[number % len(rows)]
        size = len(row.tokens)
        # A row whose length is a multiple already is left as it is, as its iterate_batches cuts it.
        width = size if size % PAD == 0 else 1 + PAD * (-(-size // PAD))
        first = row.supervised.index(True)
        loss = step(mx.array([row.tokens + [0] * (width - size)]), mx.array([[first, size - 1]]))
        mx.eval(state, loss)
        log.end_step(float(loss.item()), size, row.supervised_tokens)
    return {
        "versions": harness.versions("mlx", "mlx-lm"),
        "settings": {"weights": "float32", "checkpointing": job["gradient_checkpointing"]},
        "seconds": time.perf_counter() - began,
        "steps": log.as_json(),
        "resident_after_load_bytes": resident,
        "peak_resident_bytes": harness.peak_resident_bytes(),
    }


if __name__ == "__main__":
    harness.answer(train)
