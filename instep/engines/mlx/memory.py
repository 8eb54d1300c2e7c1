"""What MLX holds, in bytes, and the limits that it is given."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import psutil

from instep.engines.base import MemoryReport

CACHE_BYTES = {"gpu": 1 << 30, "cpu": 67108864}
"""Freed buffers that MLX keeps for reuse, at most. Unbounded, they grow with every new shape."""


def limit(gpu: bool) -> str:
    """Bound MLX's buffer cache; on Metal wire at most the recommended working set. Returns what was set."""
    cache = CACHE_BYTES["gpu" if gpu else "cpu"]
    mx.set_cache_limit(cache)
    said = f"buffer cache at most {cache >> 20} MiB"
    if not (gpu and mx.metal.is_available()):
        return said
    info: dict[str, Any] = mx.device_info()  # type: ignore[assignment]
    wired = int(info["max_recommended_working_set_size"])
    mx.set_wired_limit(wired)
    return f"{said}, wired memory at most the recommended {wired / 1e9:.1f} GB"


def report() -> MemoryReport:
    """`driver_bytes` counts MLX's cache of freed buffers too."""
    active = mx.get_active_memory()
    return MemoryReport(
        live_bytes=active,
        peak_bytes=mx.get_peak_memory(),
        driver_bytes=active + mx.get_cache_memory(),
        resident_bytes=psutil.Process().memory_info().rss,
    )
