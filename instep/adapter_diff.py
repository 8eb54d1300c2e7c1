"""Two LoRA adapters compared as what they do to the model: their products s·B·A, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from instep.adapters import PREFIX, lora_a_name, lora_b_name
from instep.config import AdapterSettings

Adapter = tuple[Mapping[str, np.ndarray], AdapterSettings]
"""Canonical names → float32 arrays, and the settings, as `adapters.load_adapter` gives them."""


@dataclass(frozen=True)
class LayerDiff:
    """One layer that both adapters have. Relative differences are ‖a − b‖ / max(‖a‖, ‖b‖), Frobenius; 0 where both
    are zero."""

    module: str
    norms: tuple[float, float]
    """‖s·B·A‖ of each."""
    difference: float
    """‖s·B·A of the one − that of the other‖."""
    cosine: float | None
    """Of the two products; None where one is zero."""
    matrices: tuple[float, float] | None
    """Relative difference of the A and of the B matrices; None where the ranks differ."""

    @property
    def relative(self) -> float:
        return _share(self.difference, max(self.norms))


@dataclass(frozen=True)
class AdapterDiff:
    layers: list[LayerDiff]
    only: tuple[list[str], list[str]]
    """Layers that only the one, and only the other has."""
    norms: tuple[float, float]
    """Over all layers of each, those of `only` too."""
    difference: float
    """Over all layers; a layer that is missing counts as zero."""
    cosine: float | None

    @property
    def relative(self) -> float:
        return _share(self.difference, max(self.norms))

    def as_dict(self) -> dict[str, Any]:
        return {
            "relative_difference": self.relative,
            "cosine": self.cosine,
            "norms": list(self.norms),
            "only_in_first": self.only[0],
            "only_in_second": self.only[1],
            "layers": [
                {
                    "module": layer.module,
                    "relative_difference": layer.relative,
                    "cosine": layer.cosine,
                    "norms": list(layer.norms),
                    "relative_difference_of_A": layer.matrices[0] if layer.matrices else None,
                    "relative_difference_of_B": layer.matrices[1] if layer.matrices else None,
                }
                for layer in self.layers
            ],
        }


def compare_adapters(first: Adapter, second: Adapter) -> AdapterDiff:
    """Adapters may differ in rank, alpha and layers: what counts is what is added to each weight."""
    both = [_modules(adapter) for adapter in (first, second)]
    shared = [module for module in both[0] if module in both[1]]
    layers = [_compare_layer(module, first, second) for module in shared]
    only = tuple(sorted(set(both[i]) - set(both[1 - i])) for i in (0, 1))
    alone = [
        [_norm(*_factors(adapter, module)) for module in names]
        for adapter, names in ((first, only[0]), (second, only[1]))
    ]
    norms = tuple(_root([layer.norms[i] for layer in layers] + alone[i]) for i in (0, 1))
    inner = sum(
        layer.cosine * layer.norms[0] * layer.norms[1] for layer in layers if layer.cosine is not None
    )
    return AdapterDiff(
        layers,
        (only[0], only[1]),
        (norms[0], norms[1]),
        _root([layer.difference for layer in layers] + alone[0] + alone[1]),
        _cosine(inner, norms[0], norms[1]),
    )


def _modules(adapter: Adapter) -> list[str]:
    end = len(lora_a_name("")) - len(PREFIX)
    return [name[len(PREFIX) : -end] for name in adapter[0] if name == lora_a_name(name[len(PREFIX) : -end])]


def _factors(adapter: Adapter, module: str) -> tuple[np.ndarray, np.ndarray]:
    """s·B [out, rank] and A [rank, in] in float64."""
    matrices, settings = adapter
    scale = settings.alpha / settings.rank
    b, a = matrices[lora_b_name(module)], matrices[lora_a_name(module)]
    return scale * b.astype(np.float64), a.astype(np.float64)


def _compare_layer(module: str, first: Adapter, second: Adapter) -> LayerDiff:
    (b1, a1), (b2, a2) = _factors(first, module), _factors(second, module)
    norms = _norm(b1, a1), _norm(b2, a2)
    # s1·B1·A1 − s2·B2·A2 as one product of rank r1 + r2.
    difference = _norm(np.hstack([b1, -b2]), np.vstack([a1, a2]))
    inner = float(np.sum((b1.T @ b2) * (a1 @ a2.T)))
    matrices = None
    if a1.shape == a2.shape:
        (plain1, _), (plain2, _) = first, second
        names = lora_a_name(module), lora_b_name(module)
        of_a, of_b = (_relative(plain1[name], plain2[name]) for name in names)
        matrices = of_a, of_b
    return LayerDiff(module, norms, difference, _cosine(inner, *norms), matrices)


def _norm(b: np.ndarray, a: np.ndarray) -> float:
    """‖B·A‖ without the product [out, in]: B = Q·R and Aᵀ = Q′·R′ give ‖R·R′ᵀ‖, exact also where parts cancel."""
    return float(np.linalg.norm(np.inner(np.linalg.qr(b, mode="r"), np.linalg.qr(a.T, mode="r"))))


def _relative(one: np.ndarray, other: np.ndarray) -> float:
    one, other = one.astype(np.float64), other.astype(np.float64)
    return _share(float(np.linalg.norm(one - other)), max(float(np.linalg.norm(x)) for x in (one, other)))


def _root(norms: list[float]) -> float:
    return float(np.sqrt(np.sum(np.square(norms)))) if norms else 0.0


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _cosine(inner: float, one: float, other: float) -> float | None:
    return max(-1.0, min(1.0, inner / (one * other))) if one and other else None
