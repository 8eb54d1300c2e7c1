"""What the process and the device hold, in bytes."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from instep.engines.base import MemoryReport

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


class Memory:
    """Memory of one device. On a CPU `peak_bytes` is the kernel's high-water mark of the resident set, which
    Linux lets a process reset (proc(5), clear_refs 5); None where it may not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._resettable = False
        self._mps_peak = 0
        self.reset_peak()

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.device.type == "mps":
            self._mps_peak = torch.mps.current_allocated_memory()
        else:
            try:
                CLEAR_REFS.write_text("5")
                self._resettable = True
            except OSError:
                self._resettable = False

    def note(self) -> None:
        """MPS keeps no peak: called where the live memory is at its highest, between forward and backward."""
        if self.device.type == "mps":
            self._mps_peak = max(self._mps_peak, torch.mps.current_allocated_memory())

    def report(self) -> MemoryReport:
        resident = psutil.Process().memory_info().rss
        if self.device.type == "cuda":
            return MemoryReport(
                torch.cuda.memory_allocated(self.device),
                torch.cuda.max_memory_allocated(self.device),
                torch.cuda.memory_reserved(self.device),
                resident,
            )
        if self.device.type == "mps":
            self.note()
            live = torch.mps.current_allocated_memory()
            return MemoryReport(live, self._mps_peak, torch.mps.driver_allocated_memory(), resident)
        return MemoryReport(resident, self._high_water(), None, resident)

    def _high_water(self) -> int | None:
        if not self._resettable:
            return None
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
