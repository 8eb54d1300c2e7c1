"""The PyTorch engine: the verbs of `instep.engines.base` on CPU, MPS and CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

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
from instep.engines.checks import check_batch, check_prompts
from instep.engines.torch import fused, loading, lora
from instep.engines.torch import layout as layouts
from instep.engines.torch.attention import Plan
from instep.engines.torch.generate import Generator
from instep.engines.torch.head import site_logprob
from instep.engines.torch.memory import Memory
from instep.engines.torch.optimizer import Trainables
from instep.errors import InputError
from instep.objectives import Objective
from instep.records import Batch, Rollout

FIELDS = ("weight", "behaviour_logprob", "reference_logprob", "advantage")


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward under non-reentrant checkpointing; plain where no gradient is wanted."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


class TorchEngine:
    name = "torch"

    def load(
        self, model: ModelSettings, adapter: AdapterSettings, optimizer: OptimizerSettings, seed: int
    ) -> LoadReport:
        """Load weights from the local folder `model.path` and attach the trainable parameters.

        Raises InputError where the folder is not a model that this engine can run.
        """
        self._optimizer = optimizer
        self._chunk = model.head_chunk
        self._device, device_reason = loading.choose_device(model.device)
        dtype, dtype_reason = loading.choose_precision(model.precision, self._device)
        self.choices = {
            "device": f"{self._device.type}: {device_reason}",
            "precision": f"{dtype}: {dtype_reason}",
        }
        self._model: Any = loading.load_model(model, self._device, dtype)
        self._decoder: Any = self._model.get_decoder()
        self._head: Any = self._model.get_output_embeddings()
        self._softcap: float | None = getattr(self._model.config, "final_logit_softcapping", None)
        self._vocabulary = int(self._head.weight.shape[0])
        self._layers: list[lora.LoraLinear] = []
        base = sum(p.numel() for p in self._model.parameters())
        weight_bytes = sum(p.numel() * p.element_size() for p in self._model.parameters())
        if adapter.kind == "lora":
            fused.listen(self._decoder)
            patches, why = fused.choose(self._decoder.layers, self._head_dim())
            self.choices["fused"] = why
            self._attach_lora(adapter, dtype, seed)
            fused.apply([self._decoder], patches)
        else:
            self._train_all(dtype)
        if model.gradient_checkpointing:
            self._checkpoint_layers()
        self._memory = Memory(self._device)
        self._poisoned = False
        return LoadReport(
            engine=self.name,
            device=str(self._device),
            precision=str(dtype).removeprefix("torch."),
            parameters=base,
            trainable_parameters=self._trainables.count,
            weight_bytes=weight_bytes,
            choices=self.choices,
        )

    def _attach_lora(self, adapter: AdapterSettings, dtype: torch.dtype, seed: int) -> None:
        names = lora.find_targets(self._model, adapter.target_modules)
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            shapes[lora_a_name(name)] = (adapter.rank, self._model.get_submodule(name).in_features)
        first = initial_adapter(dict(shapes), seed)  # type: ignore[arg-type]
        for name in names:
            shapes[lora_b_name(name)] = (self._model.get_submodule(name).out_features, adapter.rank)
        self._trainables = Trainables(shapes, self._device, dtype)
        for name, value in first.items():
            self._trainables.set(name, value)
        self._trainables.refresh()
        self._layers = lora.attach(self._model, names, self._trainables, adapter.alpha / adapter.rank)

    def _head_dim(self) -> int:
        config = self._model.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def _train_all(self, dtype: torch.dtype) -> None:
        """Every parameter is trained: float32 masters, gradients and two moments (16 bytes a parameter).

        A float32 model's parameters are the masters themselves; a 16-bit one keeps its own 2 bytes beside them,
        and each gradient is added to the float32 buffer and freed as soon as it is there.
        """
        named = dict(self._model.named_parameters())
        self._trainables = Trainables(
            {n: tuple(p.shape) for n, p in named.items()}, self._device, torch.float32
        )
        for name, parameter in named.items():
            master = self._trainables.view(self._trainables.master, name)
            master.copy_(parameter.data)
            if dtype == torch.float32:
                parameter.data = master
            parameter.requires_grad_(True)
            self._trainables.follow(name, parameter)
        self.choices["full"] = (
            f"16 bytes a parameter for float32 masters, gradient and moments, weights in {dtype}"
        )

    def _checkpoint_layers(self) -> None:
        """Each decoder layer keeps its input only and is run again in the backward pass."""
        for layer in self._decoder.layers:
            layer.forward = _recomputed(layer.forward)
        self.choices["gradient_checkpointing"] = "on: each layer is run again in the backward pass"

    def shape_rules(self) -> ShapeRules:
        """The CPU engine leaves padding out of the computation, so that small multiples cost nothing."""
        if self._device.type == "cpu":
            return ShapeRules(length_multiple=64, site_multiple=64)
        return ShapeRules(length_multiple=256, site_multiple=256)

    def _states(self, tokens: np.ndarray, position: np.ndarray, plan: Any) -> torch.Tensor:
        """Final hidden states of a flat row of N tokens [N, D]."""
        ids = torch.from_numpy(tokens).to(self._device, torch.int64)[None]
        place = torch.from_numpy(position).to(self._device, torch.int64)[None]
        return self._decoder(input_ids=ids, position_ids=place, use_cache=False, plan=plan).last_hidden_state[
            0
        ]

    def _hidden(self, layout: layouts.Layout) -> torch.Tensor:
        """Final hidden states at the layout's sites [K, D]."""
        states = self._states(layout.tokens, layout.position, Plan(layout))
        return states[torch.from_numpy(layout.site).to(self._device)]

    def _logits(self, hidden: torch.Tensor) -> np.ndarray:
        """hidden [K, D] → float32 [K, V]."""
        if self._device.type == "cpu":  # the quicker orientation for few rows (see lora.NARROW)
            logits = (
                (self._head.weight @ hidden.t()).t().to(torch.float32, memory_format=torch.contiguous_format)
            )
            logits = logits if self._head.bias is None else logits + self._head.bias
        else:
            logits = self._head(hidden).float()
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.cpu().numpy()

    def _layout(self, batch: Batch, site: np.ndarray) -> layouts.Layout:
        check_batch(batch, self._vocabulary)
        return layouts.compact(batch, site) if self._device.type == "cpu" else layouts.fixed(batch, site)

    def _logprob(
        self, batch: Batch, keep: np.ndarray, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._hidden(self._layout(batch, batch.site[keep]))
        label = torch.from_numpy(batch.label[keep]).to(self._device, torch.int64)
        return site_logprob(
            hidden, self._head.weight, self._head.bias, label, temperature, self._softcap, self._chunk
        )

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Add the gradient of the objective's sum; returns sums (see `instep.engines.base`)."""
        used = batch.weight != 0
        # Fixed shapes matter where the device caches by shape; on the CPU padding sites are left out.
        keep = np.flatnonzero(used) if self._device.type == "cpu" else np.arange(len(batch.site))
        sums = {"loss": 0.0, "weight": batch.weight_sum, "correct": 0.0, "sites": float(used.sum())}
        if not used.any():
            return sums
        logprob, correct = self._logprob(batch, keep, objective.temperature)
        fields: dict[str, Any] = {}
        for name in FIELDS:
            value = getattr(batch, name)
            if value is not None:
                fields[name] = torch.from_numpy(np.ascontiguousarray(value[keep], np.float32)).to(
                    self._device
                )
        if batch.sequence is not None:
            fields["sequence"] = torch.from_numpy(batch.sequence[keep]).to(self._device, torch.int64)
        fields["sequences"] = batch.sequences
        loss, metrics = objective(torch, logprob, fields)
        self._memory.note()
        sums["loss"] = float(loss.detach())
        if math.isfinite(sums["loss"]):
            loss.backward()
        else:
            self._poisoned = True
        sums["correct"] = float((correct & (fields["weight"] > 0)).sum())
        return sums | {name: float(value.detach()) for name, value in metrics.items()}

    def optim_step(self, learning_rate: float, denominator: float) -> StepReport:
        """Divide, clip by global norm, AdamW, zero. Changes nothing where the gradient is not finite."""
        if not denominator > 0:
            raise ValueError(f"denominator is {denominator}, expected a positive weight sum")
        if self._poisoned:
            self.zero_gradient()
            return StepReport(gradient_norm=float("nan"), applied=False)
        return self._trainables.adamw(self._optimizer, learning_rate, denominator)

    def zero_gradient(self) -> None:
        """Forget what forward_backward has added since the last step."""
        self._trainables.gradient.zero_()
        self._poisoned = False

    @contextmanager
    def _adapter(self, enabled: bool) -> Iterator[None]:
        if not enabled and not self._layers:
            raise InputError("adapter=False asks for the base model, which full fine-tuning has changed")
        for layer in self._layers:
            layer.enabled = enabled
        try:
            yield
        finally:
            for layer in self._layers:
                layer.enabled = True

    def score(self, batch: Batch, temperature: float = 1.0, adapter: bool = True) -> Scores:
        """Log-probabilities at the batch's sites, without gradient; `adapter=False` is the reference model."""
        with torch.no_grad(), self._adapter(adapter):
            logprob, correct = self._logprob(batch, np.arange(len(batch.site)), temperature)
        return Scores(logprob.cpu().numpy(), correct.cpu().numpy())

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
        check_prompts(prompts, n, sampling.max_new_tokens, self._vocabulary)
        names = range(len(prompts)) if keys is None else keys
        generator = Generator(self._states, self._logits)
        with torch.no_grad(), self._adapter(adapter):
            return generator(prompts, n, sampling, names, stop_text, on_token)

    def state(self) -> EngineState:
        return self._trainables.state()

    def load_state(self, state: EngineState) -> None:
        """Raises InputError where names or shapes differ from this engine's own."""
        self._trainables.load_state(state)
        self._poisoned = False

    def memory(self) -> MemoryReport:
        return self._memory.report()

    def reset_peak(self) -> None:
        self._memory.reset_peak()
