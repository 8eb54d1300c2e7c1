"""What the process and the device hold, in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from instep.engines.base import MemoryReport

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


class Memory:
    """Memory of one device. On a CPU `peak_bytes` is the kernel's high-water mark of the resident set, which
    Linux lets a process reset (proc(5), clear_refs 5), None where it may not; on others it is the allocator's own,
    which cannot be reset: None where nothing since the last reset has gone above what was there before.
    """

    def __init__(self, device: Any) -> None:
        self.device = device
        self._resettable = False
        self._before = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        statistics = self._statistics()
        if statistics is not None:
            self._before = statistics.get("peak_bytes_in_use", 0)
            return
        try:
            CLEAR_REFS.write_text("5")
            self._resettable = True
        except OSError:
            self._resettable = False

    def _statistics(self) -> dict[str, int] | None:
        """The allocator's counters; None where the platform keeps none (the CPU)."""
        return self.device.memory_stats() if self.device.platform != "cpu" else None

    def report(self) -> MemoryReport:
        resident = psutil.Process().memory_info().rss
        statistics = self._statistics()
        if statistics is None:
            return MemoryReport(resident, self._high_water(), None, resident)
        peak = statistics.get("peak_bytes_in_use", 0)
        return MemoryReport(
            statistics.get("bytes_in_use"),
            peak if peak > self._before else None,
            statistics.get("bytes_reserved") or statistics.get("pool_bytes"),
            resident,
        )

    def _high_water(self) -> int | None:
        if not self._resettable:
            return None
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
