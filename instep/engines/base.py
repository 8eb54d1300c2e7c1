"""The verbs of an engine, and what an engine says about itself. No framework is imported here.

An engine does not know which algorithm runs: it is handed batches and an objective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.objectives import Objective
from instep.records import Batch, Rollout


@dataclass(frozen=True)
class LoadReport:
    """What was loaded, and every choice that was made with its reason (`choices`: name → "value: reason")."""

    engine: str
    device: str
    precision: str
    parameters: int
    trainable_parameters: int
    weight_bytes: int
    choices: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ShapeRules:
    """Shapes the engine likes. L is rounded up to a multiple of `length_multiple`, K to one of `site_multiple`.

    Engines that compile or cache by shape (MPS, MLX, JAX) give large multiples, so that few shapes occur.
    """

    length_multiple: int = 64
    site_multiple: int = 64


@dataclass(frozen=True)
class StepReport:
    """One optimizer step: `gradient_norm` before clipping; `applied` is False where it was not finite."""

    gradient_norm: float
    applied: bool


@dataclass(frozen=True)
class Scores:
    """Per site [K]: log-probability of the label (float32), and whether the label is the most likely token."""

    logprob: np.ndarray
    correct: np.ndarray


@dataclass(frozen=True)
class MemoryReport:
    """Bytes; None where the engine's platform cannot tell. `peak_bytes` counts since the last `reset_peak`."""

    live_bytes: int | None
    peak_bytes: int | None
    driver_bytes: int | None
    resident_bytes: int


@dataclass(frozen=True)
class EngineState:
    """Everything that a step depends on beside the frozen base, in canonical names and shapes.

    Names are PEFT's (`base_model.model.<module>.lora_A.weight`) for adapters, and the Hugging Face parameter
    names for full fine-tuning; arrays are float32 numpy, A [rank, in], B [out, rank].
    """

    parameters: dict[str, np.ndarray]
    exp_avg: dict[str, np.ndarray]
    exp_avg_sq: dict[str, np.ndarray]
    step: int


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn. `temperature` 0 is greedy.

    `uniforms(row, t)` of the seed drives every draw, keyed by prompt and sample, never by batch layout.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0


class Engine(Protocol):
    """forward_backward adds to the gradient and returns sums; optim_step divides, clips, updates and zeroes."""

    name: str

    def load(
        self,
        model: ModelSettings,
        adapter: AdapterSettings,
        optimizer: OptimizerSettings,
        seed: int,
    ) -> LoadReport:
        """Load weights from the local folder `model.path` and attach the trainable parameters.

        Raises InputError where the folder is not a model that this engine can run.
        """
        ...

    def shape_rules(self) -> ShapeRules: ...

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Add the gradient of the objective's sum. Returns sums: `loss`, `weight`, `correct` (sites whose label
        is the most likely token, weight > 0), `sites` (weight > 0) and the objective's own metric sums.

        A non-finite loss adds nothing usable: it is returned as it is, and optim_step will not apply.
        """
        ...

    def optim_step(self, learning_rate: float, denominator: float) -> StepReport:
        """Divide the gradient by `denominator` (> 0), clip by global norm, AdamW, zero the gradient.

        Where the norm is not finite nothing is changed but the gradient, which is zeroed.
        """
        ...

    def zero_gradient(self) -> None:
        """Forget what forward_backward has added since the last step."""
        ...

    def score(self, batch: Batch, temperature: float = 1.0, adapter: bool = True) -> Scores:
        """Log-probabilities at the batch's sites, without gradient; `adapter=False` is the reference model."""
        ...

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        n: int,
        sampling: Sampling,
        keys: Sequence[int] | None = None,
        stop_text: Callable[[np.ndarray], bool] | None = None,
        on_token: Callable[[int, int, int], None] | None = None,
        adapter: bool = True,
    ) -> list[list[Rollout]]:
        """n completions for each prompt (int32 [P]), the prompt prefilled once. `keys` name the prompts for the
        seed (default 0, 1, …); `stop_text(ids so far)` ends a row; `on_token(prompt, sample, id)` streams."""
        ...

    def state(self) -> EngineState: ...

    def load_state(self, state: EngineState) -> None:
        """Raises InputError where names or shapes differ from this engine's own."""
        ...

    def memory(self) -> MemoryReport: ...

    def reset_peak(self) -> None: ...
