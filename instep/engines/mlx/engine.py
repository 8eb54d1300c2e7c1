"""The MLX engine: the verbs of `instep.engines.base` on Metal, CUDA and CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from instep.adapters import initial_adapter, lora_a_name, lora_b_name
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
from instep.engines.mlx import attention, loading, lora, memory
from instep.engines.mlx.caches import Masking, Prefix, Rows
from instep.engines.mlx.checkpointing import checkpoint_layer
from instep.engines.mlx.generate import Generator
from instep.engines.mlx.head import site_logprob, split
from instep.engines.mlx.optimizer import adamw, global_norm, number
from instep.errors import InputError
from instep.objectives import Objective
from instep.records import Batch, Rollout

FIELDS = ("weight", "behaviour_logprob", "reference_logprob", "advantage", "sequence")
PREFIX_MULTIPLE = 64  # a shared prefix is padded to a multiple, so that few lengths are traced
PROBE_TOLERANCE = {mx.float32: 1e-3, mx.bfloat16: 0.3, mx.float16: 0.05}


class MlxEngine:
    name = "mlx"

    def load(
        self, model: ModelSettings, adapter: AdapterSettings, optimizer: OptimizerSettings, seed: int
    ) -> LoadReport:
        """Load weights from the local folder `model.path` and attach the adapter.

        Raises InputError where the folder is not a model that this engine can run.
        """
        self._optimizer = optimizer
        device, device_reason = loading.choose_device(model.device)
        self._gpu = loading.is_gpu(device)
        dtype, dtype_reason = loading.choose_precision(model.precision, device)
        # On a CPU MLX runs about ten array operations ahead, so that so many chunks of logits are alive at once.
        self._chunk = model.head_chunk if self._gpu else max(32, model.head_chunk // 4)
        named = str(dtype).rpartition(".")[2]
        self.choices = {
            "device": f"{'gpu' if self._gpu else 'cpu'}: {device_reason}",
            "precision": f"{named}: {dtype_reason}",
            "memory": memory.limit(self._gpu),
        }
        if not self._gpu and (note := loading.blas_note()):
            self.choices["blas"] = note
        loaded = loading.load_model(model, dtype, self._gpu)
        self.choices |= loaded.choices
        self._model, self._vocabulary, self._window = loaded.model, loaded.vocabulary, loaded.window
        from mlx_lm.utils import get_total_parameters

        parameters = get_total_parameters(self._model)
        if not self._gpu:
            attention.route(self._model)
        self._backbone, self._head, self.choices["head"] = split(self._model)
        self._attach(adapter, seed)
        self._depth = len(self._model.layers)
        self.choices["attention"] = self._probe(dtype)
        if model.gradient_checkpointing:
            for layer in self._model.layers:
                checkpoint_layer(layer)
            self.choices["gradient_checkpointing"] = "on: each layer is run again in the backward pass"
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._update = adamw(optimizer)
        self._norm = mx.compile(global_norm)
        self.reset_peak()
        return LoadReport(
            engine=self.name,
            device="gpu" if self._gpu else "cpu",
            precision=named,
            parameters=parameters,
            trainable_parameters=sum(value.size for value in self._parameters),
            weight_bytes=mx.get_active_memory() - 4 * 4 * sum(value.size for value in self._parameters),
            choices=self.choices,
        )

    def _attach(self, adapter: AdapterSettings, seed: int) -> None:
        targets = lora.find_targets(self._model, adapter.target_modules)
        shapes: dict[str, tuple[int, int]] = {}
        for path, module in targets.items():
            shapes[lora_a_name(lora.canonical(path))] = (adapter.rank, lora.width_of(module)[1])
        first = initial_adapter(shapes, seed)
        self._layers: list[lora.LoraLinear] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path, module in targets.items():
            name = lora.canonical(path)
            a = mx.array(first[lora_a_name(name)])
            b = mx.zeros((lora.width_of(module)[0], adapter.rank))
            self._layers.append(lora.attach(self._model, path, a, b, adapter.alpha / adapter.rank))
            self._shapes[lora_a_name(name)], self._shapes[lora_b_name(name)] = a.shape, b.shape
        self._parameters = [value for layer in self._layers for value in (layer.lora_a, layer.lora_b)]
        self._exp_avg = [mx.zeros_like(value) for value in self._parameters]
        self._exp_avg_sq = [mx.zeros_like(value) for value in self._parameters]
        self._steps = 0
        self.zero_gradient()
        mx.eval(self._parameters, self._exp_avg, self._exp_avg_sq, self._gradient)

    def _bind(self, parameters: Sequence[mx.array]) -> None:
        for layer, a, b in zip(self._layers, parameters[::2], parameters[1::2], strict=True):
            layer.lora_a, layer.lora_b = a, b

    # --- forward ---------------------------------------------------------------------------------------------

    def _hidden(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        return self._backbone(tokens, cache=list(caches))

    def _states(self, batch: dict[str, mx.array]) -> mx.array:
        """Final hidden states [R·L, D] of a batch's arrays."""
        if "prefix" in batch:
            caches: list[Any] = [Prefix(batch["prefix_length"], self._masking) for _ in range(self._depth)]
            self._hidden(batch["prefix"], caches)
            states = self._hidden(batch["tokens"], [cache.continued() for cache in caches])
        else:
            shared = Rows(batch.get("segment"), self._masking)
            states = self._hidden(batch["tokens"], [shared] * self._depth)
        return states.reshape(-1, states.shape[-1])

    def _probe(self, dtype: mx.Dtype) -> str:
        """Check on a few tokens that rows packed together, and rows behind a shared prefix, give what plain rows do.

        Raises InputError where they do not: the model keeps a state that is no attention cache.
        """
        found = []
        ways = [(1, False), (2, False)]
        for head_axes, attends in ways if self._gpu else [(1, True), *ways]:
            self._masking = Masking(self._window.everywhere, head_axes, attends)
            try:
                apart = self._distance_of_layouts()
            except (TypeError, AttributeError, ValueError, IndexError, KeyError) as error:
                found.append(f"{type(error).__name__}: {error}")
                continue
            if apart <= PROBE_TOLERANCE[dtype]:
                return f"packed rows and a shared prefix: {apart:.0e} from plain rows on a few tokens"
            found.append(f"they differ from plain rows by {apart:.1e} of the largest hidden state")
        raise InputError(
            f"{type(self._model).__module__} cannot run packed rows or a shared prefix ({found[0]}), so it keeps "
            "more than keys and values: use another engine"
        )

    def _distance_of_layouts(self) -> float:
        first, second, third = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2]
        at = len(first)

        def plain(tokens: list[int]) -> mx.array:
            return self._states({"tokens": mx.array([tokens])})

        segment = mx.array([[1] * at + [2] * len(second), [1] * len(second) + [2] * at])
        packed = self._states({"tokens": mx.array([first + second, third + first]), "segment": segment})
        shared = self._states(
            {
                "tokens": mx.array([second, third]),
                "prefix": mx.array([[*first, 0, 0]]),
                "prefix_length": mx.array(at),
            }
        )
        pairs = [
            (packed, mx.concatenate([plain(first), plain(second), plain(third), plain(first)])),
            (shared, mx.concatenate([plain(first + second)[at:], plain(first + third)[at:]])),
        ]
        return max(number(mx.abs(a - b).max() / mx.abs(b).max()) for a, b in pairs)

    def shape_rules(self) -> ShapeRules:
        """Few shapes: each is traced and compiled once, and MLX's buffers are reused."""
        return ShapeRules(256, 256) if self._gpu else ShapeRules(128, 128)

    def _arrays(self, batch: Batch) -> dict[str, mx.array]:
        """The batch as arrays, checked: MLX checks no index. Padding behind rows of one sample needs no mask."""
        check_batch(batch, self._vocabulary)
        longest = self._window.longest
        length = batch.tokens.shape[1] + (0 if batch.prefix is None else len(batch.prefix))
        if longest is not None and length > longest:
            raise InputError(
                f"a row of {length} tokens is longer than the model's sliding window of {longest}, which mlx-lm "
                f"leaves out: set rendering.max_length to at most {longest}, or use another engine"
            )
        arrays = {"tokens": batch.tokens, "site": batch.site, "label": batch.label}
        if not batch.one_segment_per_row:
            arrays["segment"] = batch.segment
        if batch.prefix is not None:
            width = -(-len(batch.prefix) // PREFIX_MULTIPLE) * PREFIX_MULTIPLE
            arrays["prefix"] = np.pad(batch.prefix, (0, width - len(batch.prefix)))[None]
        found = {name: mx.array(np.ascontiguousarray(value, np.int32)) for name, value in arrays.items()}
        if batch.prefix is not None:
            found["prefix_length"] = mx.array(len(batch.prefix), mx.int32)
        return found

    # --- the step --------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Add the gradient of the objective's sum; returns sums (see `instep.engines.base`)."""
        used = batch.weight != 0
        sums = {"loss": 0.0, "weight": batch.weight_sum, "correct": 0.0, "sites": float(used.sum())}
        arrays = self._arrays(batch)
        if not used.any():
            return sums
        for name in FIELDS:
            value = getattr(batch, name)
            if value is not None:
                kind = np.int32 if name == "sequence" else np.float32
                arrays[name] = mx.array(np.ascontiguousarray(value, kind))
        key = ("step", objective, frozenset(arrays))
        if key not in self._compiled:
            self._compiled[key] = self._compile_step(objective)
        try:
            loss, correct, metrics, gradient = self._compiled[key](self._parameters, self._gradient, arrays)
            mx.eval(loss, correct, metrics, gradient)
        finally:
            self._bind(self._parameters)
        sums["loss"] = number(loss)
        sums["correct"] = number(correct)
        if math.isfinite(sums["loss"]):
            self._gradient = gradient
        else:
            self._poisoned = True
        return sums | {name: number(value) for name, value in metrics.items()}

    def _compile_step(self, objective: Objective) -> Callable[..., Any]:
        def loss_of(
            parameters: list[mx.array], batch: dict[str, mx.array]
        ) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
            self._bind(parameters)
            hidden = self._states(batch)[batch["site"]]
            logprob, correct = site_logprob(
                self._head, hidden, batch["label"], objective.temperature, self._chunk, gradient=True
            )
            fields = {name: batch[name] for name in FIELDS if name in batch}
            loss, metrics = objective(mx, logprob, fields)
            counted = mx.sum(mx.where(correct & (batch["weight"] > 0), 1.0, 0.0))
            return loss, counted, metrics

        def step(
            parameters: list[mx.array], gradient: list[mx.array], batch: dict[str, mx.array]
        ) -> tuple[mx.array, mx.array, dict[str, mx.array], list[mx.array]]:
            (loss, correct, metrics), more = mx.value_and_grad(loss_of)(parameters, batch)
            return loss, correct, metrics, [a + b for a, b in zip(gradient, more, strict=True)]

        return mx.compile(step)

    def optim_step(self, learning_rate: float, denominator: float) -> StepReport:
        """Divide, clip by global norm, AdamW, zero. Changes nothing where the gradient is not finite."""
        if not denominator > 0:
            raise ValueError(f"denominator is {denominator}, expected a positive weight sum")
        norm = float("nan") if self._poisoned else number(self._norm(self._gradient)) / denominator
        if not math.isfinite(norm):
            self.zero_gradient()
            return StepReport(gradient_norm=norm, applied=False)
        settings = self._optimizer
        clip = min(1.0, settings.clip_norm / norm) if norm > 0 else 1.0
        self._steps += 1
        scalars = (
            learning_rate,
            clip / denominator,
            1 - settings.beta1**self._steps,
            1 - settings.beta2**self._steps,
        )
        self._parameters, self._exp_avg, self._exp_avg_sq = self._update(
            self._parameters, self._gradient, self._exp_avg, self._exp_avg_sq, *map(mx.array, scalars)
        )
        self.zero_gradient()
        self._bind(self._parameters)
        mx.eval(self._parameters, self._exp_avg, self._exp_avg_sq, self._gradient)
        return StepReport(gradient_norm=norm, applied=True)

    def zero_gradient(self) -> None:
        """Forget what forward_backward has added since the last step."""
        self._gradient = [mx.zeros_like(value) for value in self._parameters]
        self._poisoned = False

    # --- without gradient ------------------------------------------------------------------------------------

    @contextmanager
    def _adapter(self, enabled: bool) -> Iterator[None]:
        for layer in self._layers:
            layer.enabled = enabled
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enabled = True

    def score(self, batch: Batch, temperature: float = 1.0, adapter: bool = True) -> Scores:
        """Log-probabilities at the batch's sites, without gradient; `adapter=False` is the reference model."""
        arrays = self._arrays(batch)
        key = ("score", temperature, adapter, frozenset(arrays))
        if key not in self._compiled:

            def evaluate(parameters: list[mx.array], batch: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
                self._bind(parameters)
                hidden = self._states(batch)[batch["site"]]
                return site_logprob(
                    self._head, hidden, batch["label"], temperature, self._chunk, gradient=False
                )

            self._compiled[key] = mx.compile(evaluate)
        with self._adapter(adapter):
            try:
                logprob, correct = self._compiled[key](self._parameters, arrays)
                mx.eval(logprob, correct)
            finally:
                self._bind(self._parameters)
        return Scores(np.array(logprob), np.array(correct))

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
        with ids outside the vocabulary, and for more tokens than mlx-lm computes rightly.
        """
        check_prompts(prompts, n, sampling.max_new_tokens, self._vocabulary)
        longest = self._window.longest
        most = max(map(len, prompts)) + sampling.max_new_tokens
        if longest is not None and most > longest:
            raise InputError(
                f"prompt and completion may come to {most} tokens, more than the model's sliding window of {longest}, "
                "which mlx-lm leaves out: lower max_new_tokens, or use another engine"
            )
        names = range(len(prompts)) if keys is None else keys
        generator = Generator(self._hidden, self._head, self._depth, self._masking)
        with self._adapter(adapter):
            return generator(prompts, n, sampling, names, stop_text, on_token)

    # --- state -----------------------------------------------------------------------------------------------

    def state(self) -> EngineState:
        def arrays(values: Sequence[mx.array]) -> dict[str, np.ndarray]:
            return {name: np.array(value) for name, value in zip(self._shapes, values, strict=True)}

        return EngineState(
            arrays(self._parameters), arrays(self._exp_avg), arrays(self._exp_avg_sq), self._steps
        )

    def load_state(self, state: EngineState) -> None:
        """Raises InputError where names or shapes differ from this engine's own."""
        check_state(state, self._shapes)

        def arrays(values: dict[str, np.ndarray]) -> list[mx.array]:
            return [mx.array(np.ascontiguousarray(values[name], np.float32)) for name in self._shapes]

        self._parameters = arrays(state.parameters)
        self._exp_avg, self._exp_avg_sq = arrays(state.exp_avg), arrays(state.exp_avg_sq)
        self._steps = int(state.step)
        self.zero_gradient()
        self._bind(self._parameters)
        mx.eval(self._parameters, self._exp_avg, self._exp_avg_sq, self._gradient)

    def memory(self) -> MemoryReport:
        return memory.report()

    def reset_peak(self) -> None:
        mx.reset_peak_memory()
