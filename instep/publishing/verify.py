"""Whether a fused model says what the adapter said: log-probabilities of the same tokens, side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from instep import engines
from instep.batching import collate
from instep.config import ModelSettings
from instep.engines.base import Engine
from instep.errors import InputError
from instep.loops.prompts import prompt_renderer
from instep.loops.run import load_trained
from instep.records import Batch, Message, Sample

EXAMPLE = (
    Message("user", "Why does the second test fail, and what is the smallest change that mends it?"),
    Message(
        "assistant",
        "It divides by the length of an empty list. Return 0 there before dividing; I have run it.",
    ),
)
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Mean absolute difference of log-probabilities (nats) that the type's rounding may explain."""


@dataclass(frozen=True)
class Check:
    """Nats over `tokens` tokens: fused model against adapter on (mean and largest absolute difference), and what
    the adapter changes at all (mean absolute difference between adapter on and off)."""

    tokens: int
    engine: str
    precision: str
    mean_difference: float
    largest_difference: float
    adapter_effect: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    model: ModelSettings, base: Path, adapter: str | Path, fused: Path, engine: str, stored: str
) -> Check:
    """Compare on `EXAMPLE` by the engine's `score`, in float32 where memory allows.

    `stored` is the type of the fused weights. Raises InputError where the two differ by more than that explains.
    """
    name, _ = engines.choose(engine)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    roomy = psutil.virtual_memory().available > 6 * size
    plain = model.model_copy(
        update={
            "precision": "float32" if roomy else "auto",
            "quantization": "none",
            "gradient_checkpointing": False,
        }
    )
    renderer = prompt_renderer(base)
    prompt = renderer.prompt(EXAMPLE[:1])
    answer = renderer.tokenizer.encode(EXAMPLE[1].content, add_special_tokens=False)
    tokens = np.concatenate([prompt, np.array(answer, np.int32)]).astype(np.int32)
    weight = np.ones(len(tokens), np.float32)
    weight[0] = 0.0

    def batch(one: Engine) -> Batch:
        return collate([[Sample(tokens, weight)]], one.shape_rules())

    loaded, report = load_trained(name, plain, base, adapter)
    count = len(tokens) - 1
    on = loaded.score(batch(loaded)).logprob[:count]
    off = loaded.score(batch(loaded), adapter=False).logprob[:count]
    del loaded
    whole, _ = load_trained(name, plain, fused)
    other = whole.score(batch(whole), adapter=False).logprob[:count]
    effect = float(np.abs(on - off).mean())
    check = Check(
        count,
        report.engine,
        report.precision,
        float(np.abs(other - on).mean()),
        float(np.abs(other - on).max()),
        effect,
    )
    allowed = max(TOLERANCE[report.precision], TOLERANCE.get(stored, 0.1))
    if not check.mean_difference <= allowed:
        raise InputError(
            f"the fused model does not say what the adapter says: their log-probabilities differ by "
            f"{check.mean_difference:.3f} nats a token (allowed {allowed}); nothing was kept"
        )
    return check
