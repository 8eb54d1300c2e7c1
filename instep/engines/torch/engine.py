"""The PyTorch engine: the verbs of `instep.engines.base` on CPU, MPS and CUDA."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from instep.adapters import initial_adapter, lora_a_name, lora_b_name
from instep.config import AdapterSettings, ModelSettings, OptimizerSettings
from instep.engines.base import (
    EngineState,
    LoadReport,
    MemoryReport,
    Scores,
    ShapeRules,
    StepReport,
)
from instep.engines.torch import layout as layouts
from instep.engines.torch import loading, lora
from instep.engines.torch.attention import Plan
from instep.engines.torch.head import site_logprob
from instep.engines.torch.memory import Memory
from instep.engines.torch.optimizer import Trainables
from instep.errors import InputError
from instep.objectives import Objective
from instep.records import Batch

FIELDS = ("weight", "behaviour_logprob", "reference_logprob", "advantage")


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
            self._attach_lora(adapter, dtype, seed)
        else:
            raise InputError("adapter.kind 'full' is not built yet")
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

    def shape_rules(self) -> ShapeRules:
        """The CPU engine leaves padding out of the computation, so that small multiples cost nothing."""
        if self._device.type == "cpu":
            return ShapeRules(length_multiple=64, site_multiple=64)
        return ShapeRules(length_multiple=256, site_multiple=256)

    def _hidden(self, layout: layouts.Layout) -> torch.Tensor:
        """Final hidden states at the layout's sites [K, D]."""
        tokens = torch.from_numpy(layout.tokens).to(self._device, torch.int64)[None]
        position = torch.from_numpy(layout.position).to(self._device, torch.int64)[None]
        output = self._decoder(input_ids=tokens, position_ids=position, use_cache=False, plan=Plan(layout))
        return output.last_hidden_state[0][torch.from_numpy(layout.site).to(self._device)]

    def _layout(self, batch: Batch, site: np.ndarray) -> layouts.Layout:
        layouts.check(batch, self._vocabulary)
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
        return sums | {name: float(value) for name, value in metrics.items()}

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
