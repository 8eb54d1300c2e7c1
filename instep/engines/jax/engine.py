"""The JAX engine: the verbs of `instep.engines.base` on TPU, GPU and CPU through XLA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from instep import models
from instep.adapters import initial_adapter
from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.base import (
    EngineState,
    LoadReport,
    MemoryReport,
    Sampling,
    Scores,
    ShapeRules,
    StepReport,
)
from instep.engines.checks import check_batch, check_prompts, check_state
from instep.engines.jax import environment, step
from instep.engines.jax.compile_time import COMPILED
from instep.engines.jax.decoder import Setup
from instep.engines.jax.families import read_architecture
from instep.engines.jax.generate import Generator
from instep.engines.jax.kernels import choose_kernel
from instep.engines.jax.layout import Layout, lay_out
from instep.engines.jax.lora import Names, Tree
from instep.engines.jax.memory import Memory
from instep.engines.jax.mesh import Placement, choose_devices, fetch
from instep.engines.jax.optimizer import AdamW
from instep.engines.jax.safetensors_files import read_tensors
from instep.engines.jax.weights import count_bytes, count_parameters, load_weights
from instep.errors import InputError
from instep.objectives import Objective
from instep.records import Batch, Rollout

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


class JaxEngine:
    name = "jax"

    def load(
        self, model: ModelSettings, adapter: AdapterSettings, optimizer: OptimizerSettings, seed: int
    ) -> LoadReport:
        """Load weights from the local folder `model.path` and attach the adapters.

        Raises InputError where the folder is not a model that this engine can run.
        """
        if adapter.kind != "lora":
            raise InputError(
                f"adapter.kind is {adapter.kind!r}, which the jax engine cannot train: take 'lora'"
            )
        if model.quantization not in ("none", "4bit"):
            raise InputError(
                f"model.quantization is {model.quantization!r}: the jax engine knows 'none' and '4bit' (NF4)"
            )
        architecture = read_architecture(model.path)
        names = Names(architecture, adapter.target_modules, adapter.rank, _layers_path(model.path))
        processes = environment.join_processes()
        devices, device_reason = choose_devices(model.device)
        self._placement = Placement.over(devices)
        self._device = self._placement.device
        dtype, dtype_reason = _choose_precision(model.precision, self._device)
        kernel, kernel_reason = choose_kernel(self._device, dtype, architecture.head_dim, len(devices))
        self._setup = Setup(
            architecture,
            adapter.alpha / adapter.rank,
            kernel,
            "recompute" if model.gradient_checkpointing else "train",
            model.head_chunk,
        )
        self._weights = load_weights(
            read_tensors(model.path), architecture, dtype, self._placement, model.quantization, model.path
        )
        self._names = names
        self._optimizer = optimizer
        first = names.stack(initial_adapter(names.a_shapes, seed), self._placement)
        self._trained = AdamW(first)
        self._memory = Memory(self._device)
        self._poisoned = False
        choices = {
            "device": f"{self._device.platform}: {device_reason}",
            "precision": f"{jnp.dtype(dtype).name}: {dtype_reason}",
            "attention": f"{kernel}: {kernel_reason}",
            "compilation": "one program for each shape, compiled when it first occurs; its time is apart from that "
            "of steps (seconds_compile)",
        }
        if len(devices) > 1:
            data, parts = self._placement.mesh.devices.shape
            choices["mesh"] = f"data {data} x model {parts}: rows over data, weights over both"
        if processes:
            choices["processes"] = processes
        if model.quantization == "4bit":
            choices["quantization"] = (
                "NF4 in blocks of 64 for the linear layers; embedding and head stay as they are"
            )
        if model.gradient_checkpointing:
            choices["gradient_checkpointing"] = "on: each layer is run again in the backward pass"
        return LoadReport(
            engine=self.name,
            device=str(self._device),
            precision=jnp.dtype(dtype).name,
            parameters=count_parameters(architecture),
            trainable_parameters=names.count,
            weight_bytes=count_bytes(self._weights),
            choices=choices,
        )

    @property
    def compile_seconds(self) -> float:
        """Time that this process has spent on compiling so far; loops log it beside the time of steps."""
        return COMPILED.seconds

    def shape_rules(self) -> ShapeRules:
        """Every shape is compiled once. The engine rounds further (`layout.bucket`), and the number of sites is
        no part of its shapes."""
        return ShapeRules(length_multiple=self._multiple, site_multiple=256)

    @property
    def _multiple(self) -> int:
        return 64 if self._device.platform == "cpu" else 128

    def _layout(self, batch: Batch, keep: np.ndarray) -> Layout:
        check_batch(batch, self._setup.architecture.vocabulary)
        return lay_out(batch, keep, self._setup.chunk, self._multiple, self._placement)

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Add the gradient of the objective's sum; returns sums (see `instep.engines.base`)."""
        used = np.flatnonzero(batch.weight != 0)
        sums = {"loss": 0.0, "weight": batch.weight_sum, "correct": 0.0, "sites": float(len(used))}
        layout = self._layout(batch, used)
        if not len(used):
            return sums
        self._trained.gradient, computed = step.accumulate(
            self._setup,
            layout.grid,
            objective,
            self._weights,
            self._trained.master,
            self._trained.gradient,
            layout.arrays,
        )
        sums |= {name: float(value) for name, value in jax.tree.map(fetch, computed).items()}
        if not math.isfinite(sums["loss"]):
            self._poisoned = True
        return sums

    def optim_step(self, learning_rate: float, denominator: float) -> StepReport:
        """Divide, clip by global norm, AdamW, zero. Changes nothing where the gradient is not finite."""
        if not denominator > 0:
            raise ValueError(f"denominator is {denominator}, expected a positive weight sum")
        if self._poisoned:
            self.zero_gradient()
            return StepReport(gradient_norm=float("nan"), applied=False)
        return self._trained.update(self._optimizer, learning_rate, denominator)

    def zero_gradient(self) -> None:
        """Forget what forward_backward has added since the last step."""
        self._trained.zero_gradient()
        self._poisoned = False

    def _adapter(self, enabled: bool) -> Tree | None:
        return self._trained.master if enabled else None

    def score(self, batch: Batch, temperature: float = 1.0, adapter: bool = True) -> Scores:
        """Log-probabilities at the batch's sites, without gradient; `adapter=False` is the reference model."""
        layout = self._layout(batch, np.arange(len(batch.site)))
        setup = replace(self._setup, mode="forward")
        logprob, correct = step.score(
            setup, layout.grid, float(temperature), self._weights, self._adapter(adapter), layout.arrays
        )
        count = len(batch.site)
        return Scores(fetch(logprob)[:count].copy(), fetch(correct)[:count].copy())

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
        """n completions for each prompt (int32 [P]), the prompt prefilled once; see `instep.engines.base`.

        `Rollout.text` is left empty: the engine has no tokenizer. Raises InputError for an empty prompt or one
        with ids outside the vocabulary.
        """
        check_prompts(prompts, n, sampling.max_new_tokens, self._setup.architecture.vocabulary)
        names = range(len(prompts)) if keys is None else keys
        setup = replace(self._setup, mode="forward")
        generator = Generator(setup, self._weights, self._adapter(adapter), self._placement, self._multiple)
        return generator(prompts, n, sampling, names, stop_text, on_token)

    def state(self) -> EngineState:
        trained, names = self._trained, self._names
        trees = (trained.master, trained.exp_avg, trained.exp_avg_sq)
        parameters, exp_avg, exp_avg_sq = (names.unstack(tree) for tree in trees)
        return EngineState(parameters, exp_avg, exp_avg_sq, trained.step)

    def load_state(self, state: EngineState) -> None:
        """Raises InputError where names or shapes differ from this engine's own."""
        check_state(state, self._names.shapes)
        trained = AdamW(self._names.stack(state.parameters, self._placement))
        trained.exp_avg = self._names.stack(state.exp_avg, self._placement)
        trained.exp_avg_sq = self._names.stack(state.exp_avg_sq, self._placement)
        trained.step = int(state.step)
        self._trained, self._poisoned = trained, False

    def memory(self) -> MemoryReport:
        return self._memory.report()

    def reset_peak(self) -> None:
        self._memory.reset_peak()


def _layers_path(path: str) -> str:
    """Path of the decoder's layers in the Hugging Face model, which is deeper where it is a multimodal one."""
    multimodal = "text_config" in models.read_config(path)
    return "model.language_model.layers" if multimodal else "model.layers"


def _choose_precision(wanted: str, device: Any) -> tuple[Any, str]:
    """Data type of the frozen base and of activations, and the reason for it."""
    if wanted != "auto":
        return DTYPES[wanted], "asked for"
    if device.platform == "cpu":
        return jnp.float32, "XLA's float32 products are the quick ones on a CPU"
    return jnp.bfloat16, f"the {device.platform} multiplies bfloat16 at full speed"
