"""A tiny engine in numpy that really learns: it drives loop tests without a framework.

The model is a log-linear one over short contexts: h_t = e[token_t] + ½ e[token_{t-1}] within the segment,
logits = h (W0 + s·B A)ᵀ. W0 and e are frozen and seeded, the adapter is A [rank, D], B [V, rank].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

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
from instep.errors import InputError
from instep.objectives import Objective
from instep.records import Batch, Rollout, StopReason

VOCABULARY, HIDDEN = 64, 32
A_NAME = "base_model.model.head.lora_A.weight"
B_NAME = "base_model.model.head.lora_B.weight"


class FakeEngine:
    """See engines/base.py for the verbs. `load` takes no folder: the weights come from the seed."""

    name = "fake"

    def load(
        self, model: ModelSettings, adapter: AdapterSettings, optimizer: OptimizerSettings, seed: int
    ) -> LoadReport:
        base = np.random.default_rng(7)
        self.embedding = base.normal(size=(VOCABULARY, HIDDEN))
        self.base = base.normal(size=(VOCABULARY, HIDDEN)) / HIDDEN
        rng = np.random.default_rng(seed)
        self.parameters = {
            A_NAME: rng.uniform(-1, 1, (adapter.rank, HIDDEN)) / np.sqrt(HIDDEN),
            B_NAME: np.zeros((VOCABULARY, adapter.rank)),
        }
        self.scale = adapter.alpha / adapter.rank
        self.optimizer = optimizer
        self.exp_avg = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self.exp_avg_sq = {name: np.zeros_like(value) for name, value in self.parameters.items()}
        self.steps = 0
        self.zero_gradient()
        trainable = sum(value.size for value in self.parameters.values())
        size = self.base.size + self.embedding.size
        return LoadReport(self.name, "cpu", "float64", size, trainable, size * 8)

    def shape_rules(self) -> ShapeRules:
        return ShapeRules(length_multiple=8, site_multiple=8)

    def zero_gradient(self) -> None:
        self.gradient = {name: np.zeros_like(value) for name, value in self.parameters.items()}

    def _hidden(
        self, tokens: np.ndarray, segment: np.ndarray, prefix: np.ndarray | None = None
    ) -> np.ndarray:
        embedded = self.embedding[tokens]
        before = np.roll(embedded, 1, axis=1)
        same = segment == np.roll(segment, 1, axis=1)
        same[:, 0] = prefix is not None
        if prefix is not None:
            before[:, 0] = self.embedding[prefix[-1]]
        return embedded + 0.5 * before * same[..., None]

    def _logprobs(self, hidden: np.ndarray, temperature: float, adapter: bool = True) -> np.ndarray:
        weight = self.base
        if adapter:
            weight = weight + self.scale * self.parameters[B_NAME] @ self.parameters[A_NAME]
        logits = hidden @ weight.T / temperature
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        hidden = self._hidden(batch.tokens, batch.segment, batch.prefix).reshape(-1, HIDDEN)[batch.site]
        table = self._logprobs(hidden, objective.temperature)
        picked = table[np.arange(len(batch.label)), batch.label]
        fields = {
            name: value
            for name in ("weight", "behaviour_logprob", "reference_logprob", "advantage", "sequence")
            if (value := getattr(batch, name)) is not None
        }
        loss, sums = objective(np, picked, fields)
        slope = _slope(objective, picked, fields)
        inner = -np.exp(table)
        inner[np.arange(len(batch.label)), batch.label] += 1
        by_weight = (slope[:, None] * inner / objective.temperature).T @ hidden  # [V, D]
        self.gradient[A_NAME] += self.scale * self.parameters[B_NAME].T @ by_weight
        self.gradient[B_NAME] += self.scale * by_weight @ self.parameters[A_NAME].T
        real = batch.weight > 0
        return {
            "loss": float(loss),
            "weight": batch.weight_sum,
            "correct": float((table.argmax(-1) == batch.label)[real].sum()),
            "sites": float(real.sum()),
            **{name: float(value) for name, value in sums.items()},
        }

    def optim_step(self, learning_rate: float, denominator: float) -> StepReport:
        gradient = {name: value / denominator for name, value in self.gradient.items()}
        norm = float(np.sqrt(sum((value**2).sum() for value in gradient.values())))
        self.zero_gradient()
        if not np.isfinite(norm):
            return StepReport(norm, False)
        o, clip = self.optimizer, min(1.0, self.optimizer.clip_norm / (norm + 1e-6))
        self.steps += 1
        for name, value in gradient.items():
            first, second = self.exp_avg[name], self.exp_avg_sq[name]
            first[:] = o.beta1 * first + (1 - o.beta1) * value * clip
            second[:] = o.beta2 * second + (1 - o.beta2) * (value * clip) ** 2
            corrected = first / (1 - o.beta1**self.steps)
            scale = np.sqrt(second / (1 - o.beta2**self.steps)) + o.epsilon
            parameter = self.parameters[name]
            parameter[:] = (
                parameter * (1 - learning_rate * o.weight_decay) - learning_rate * corrected / scale
            )
        # Canonical state is float32: keeping it so makes a resumed run equal an uninterrupted one.
        for tree in (self.parameters, self.exp_avg, self.exp_avg_sq):
            for value in tree.values():
                value[:] = value.astype(np.float32)
        return StepReport(norm, True)

    def score(self, batch: Batch, temperature: float = 1.0, adapter: bool = True) -> Scores:
        hidden = self._hidden(batch.tokens, batch.segment, batch.prefix).reshape(-1, HIDDEN)[batch.site]
        table = self._logprobs(hidden, temperature, adapter)
        picked = table[np.arange(len(batch.label)), batch.label]
        return Scores(picked.astype(np.float32), table.argmax(-1) == batch.label)

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
        keys = range(len(prompts)) if keys is None else keys
        return [
            [self._sample(prompt, (p, key, s), sampling, stop_text, on_token, adapter) for s in range(n)]
            for p, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
        ]

    def _sample(
        self,
        prompt: np.ndarray,
        place: tuple[int, int, int],
        sampling: Sampling,
        stop_text: Callable[[np.ndarray], bool] | None,
        on_token: Callable[[int, int, int], None] | None,
        adapter: bool,
    ) -> Rollout:
        number, key, index = place
        rng = np.random.default_rng([sampling.seed, key, index])
        tokens, logprobs, stop = list(prompt), [], StopReason.LENGTH
        for _ in range(sampling.max_new_tokens):
            context = np.array([tokens[-2:]], np.int32)
            table = self._logprobs(
                self._hidden(context, np.ones_like(context))[0, -1], sampling.temperature or 1.0, adapter
            )
            draw = int(np.searchsorted(np.cumsum(np.exp(table)), rng.random()))
            token = int(table.argmax()) if sampling.temperature == 0 else min(draw, VOCABULARY - 1)
            tokens.append(token)
            logprobs.append(table[token])
            if on_token:
                on_token(number, index, token)
            if token in sampling.stop_tokens:
                stop = StopReason.END_OF_TURN
                break
            if stop_text and stop_text(np.array(tokens[len(prompt) :])):
                stop = StopReason.STOP_STRING
                break
        return Rollout(np.array(tokens[len(prompt) :], np.int32), np.array(logprobs, np.float32), stop)

    def state(self) -> EngineState:
        def copy(tree: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: value.astype(np.float32) for name, value in tree.items()}

        return EngineState(copy(self.parameters), copy(self.exp_avg), copy(self.exp_avg_sq), self.steps)

    def load_state(self, state: EngineState) -> None:
        for name, value in self.parameters.items():
            if name not in state.parameters or state.parameters[name].shape != value.shape:
                raise InputError(f"state does not fit: expected {name} {value.shape}")
            value[:] = state.parameters[name]
            self.exp_avg[name][:] = state.exp_avg[name]
            self.exp_avg_sq[name][:] = state.exp_avg_sq[name]
        self.steps = state.step

    def memory(self) -> MemoryReport:
        return MemoryReport(None, None, None, 0)

    def reset_peak(self) -> None:
        pass


def _slope(objective: Objective, logprob: np.ndarray, fields: dict[str, np.ndarray]) -> np.ndarray:
    """d loss / d log p at each site by central differences: sites are few, and any objective will do."""
    out, width = np.zeros(len(logprob)), 1e-5
    for site in np.flatnonzero(fields["weight"]):
        ends = []
        for sign in (1, -1):
            moved = logprob.astype(np.float64)
            moved[site] += sign * width
            ends.append(float(objective(np, moved, fields)[0]))
        out[site] = (ends[0] - ends[1]) / (2 * width)
    return out
