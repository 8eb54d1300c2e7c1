"""Low-rank adapters (LoRA, arXiv 2106.09685) as a tree of their own: stacked over layers, always float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from instep.adapters import lora_a_name, lora_b_name
from instep.engines.jax.architecture import Architecture
from instep.engines.jax.mesh import Placement, fetch
from instep.engines.jax.weights import MODULE
from instep.errors import InputError

Tree = dict[str, dict[str, jax.Array]]
"""Last name of a linear layer → {"a": [layers, rank, in], "b": [layers, out, rank]}."""


class Names:
    """The canonical names of the matrices that lie in a Tree, in the order of the layers."""

    def __init__(self, architecture: Architecture, targets: Sequence[str], rank: int, base: str) -> None:
        """`base` is the path of the decoder's layers in the Hugging Face model. Raises InputError where a target
        names no linear layer of the decoder."""
        unknown = [target for target in targets if target not in MODULE]
        if unknown:
            raise InputError(
                f"adapter.target_modules: {', '.join(unknown)} is no linear layer of the decoder; "
                f"its linear layers are {', '.join(sorted(MODULE))}"
            )
        self.targets = [name for name in MODULE if name in targets]
        self.layers, self.rank = architecture.layers, rank
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._where: dict[str, tuple[str, str, int]] = {}
        for layer in range(self.layers):
            for target in self.targets:
                module = f"{base}.{layer}.{MODULE[target]}"
                width_in, width_out = architecture.widths[target]
                for name, kind, shape in (
                    (lora_a_name(module), "a", (rank, width_in)),
                    (lora_b_name(module), "b", (width_out, rank)),
                ):
                    self.shapes[name] = shape
                    self._where[name] = (target, kind, layer)

    @property
    def a_shapes(self) -> dict[str, tuple[int, int]]:
        return {name: self.shapes[name] for name, (_, kind, _) in self._where.items() if kind == "a"}  # type: ignore[misc]

    @property
    def count(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def stack(self, arrays: Mapping[str, np.ndarray], placement: Placement) -> Tree:
        """Canonical arrays → a Tree on the mesh; a name that is not there is zero."""
        tree: dict[str, dict[str, np.ndarray]] = {target: {} for target in self.targets}
        for name, (target, kind, layer) in self._where.items():
            stack = tree[target].setdefault(kind, np.zeros((self.layers, *self.shapes[name]), np.float32))
            if name in arrays:
                stack[layer] = arrays[name]
        return jax.tree.map(placement.put, tree)

    def unstack(self, tree: Tree) -> dict[str, np.ndarray]:
        """A Tree → canonical float32 arrays, each with memory of its own."""
        host = jax.tree.map(fetch, tree)
        return {name: host[target][kind][layer].copy() for name, (target, kind, layer) in self._where.items()}
