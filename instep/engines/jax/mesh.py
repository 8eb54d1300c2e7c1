"""Where arrays live: one mesh (`data`, `model`) over all devices, be it one.

Rows of a batch are split over `data`. Every large weight is split over both axes and gathered layer by layer (as
in FSDP, arXiv 2304.11277); along `model` a layer's products are split over heads or features.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from instep.errors import InputError

DATA, MODEL = "data", "model"
SHAPE_VARIABLE = "INSTEP_JAX_MESH"
Axes = tuple[str | None, ...]


def choose_devices(wanted: str) -> tuple[list[Any], str]:
    """The devices of the kind asked for, and the reason. Raises InputError where there are none."""
    if wanted == "auto":
        devices = jax.devices()
        return devices, f"{devices[0].device_kind}: JAX's default" + _times(devices)
    try:
        devices = jax.devices(wanted)
    except RuntimeError as error:
        raise InputError(
            f"device {wanted!r} is not on this machine for JAX (it has: {jax.default_backend()}): "
            "set model.device = 'auto', or install jax with support for it"
        ) from error
    return devices, "asked for" + _times(devices)


def _times(devices: list[Any]) -> str:
    return f", {len(devices)} of them" if len(devices) > 1 else ""


def mesh_shape(devices: int) -> tuple[int, int]:
    """(data, model): INSTEP_JAX_MESH, such as 2x4, or all devices along `data`. Raises InputError."""
    asked = os.environ.get(SHAPE_VARIABLE)
    if not asked:
        return devices, 1
    parts = asked.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise InputError(f"{SHAPE_VARIABLE} is {asked!r}: expected <data>x<model>, such as {devices}x1")
    shape = int(parts[0]), int(parts[1])
    if shape[0] * shape[1] != devices:
        raise InputError(
            f"{SHAPE_VARIABLE} is {asked!r}, which is not the {devices} devices that there are: "
            f"expected for example {devices}x1"
        )
    return shape


@dataclass(frozen=True)
class Placement:
    """The mesh, and how arrays are put on it."""

    mesh: Mesh

    @classmethod
    def over(cls, devices: list[Any]) -> Placement:
        shape = mesh_shape(len(devices))
        return cls(jax.make_mesh(shape, (DATA, MODEL), (AxisType.Auto,) * 2, devices=devices))

    @property
    def device(self) -> Any:
        return self.mesh.devices.flat[0]

    @property
    def data(self) -> int:
        return self.mesh.shape[DATA]

    def sharding(self, axes: Axes = (), shape: tuple[int, ...] | None = None) -> NamedSharding:
        """Split along the named axes; one that does not divide its dimension of `shape` is left out."""
        if shape is not None:
            axes = tuple(
                axis if axis is None or size % self.mesh.shape[axis] == 0 else None
                for axis, size in zip(axes, shape, strict=False)
            )
        return NamedSharding(self.mesh, PartitionSpec(*axes))

    def put(self, value: np.ndarray | np.generic | jax.Array, axes: Axes = ()) -> jax.Array:
        """The array on the mesh; in a run of several processes every one of them has the whole `value`."""
        sharding = self.sharding(axes, tuple(value.shape))
        if sharding.is_fully_addressable:
            return jax.device_put(value, sharding)
        whole = np.asarray(value)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def fetch(value: jax.Array) -> np.ndarray:
    """The whole array on the host; of one whose parts lie with several processes, all of them take part."""
    if value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(value, tiled=True))
