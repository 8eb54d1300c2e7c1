"""What the machine says about its memory: available, swap, pressure. Linux and macOS; elsewhere what psutil knows."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

PRESSURE_FILE = Path("/proc/pressure/memory")
VMSTAT_FILE = Path("/proc/vmstat")
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
SOME_WARNING, FULL_CRITICAL = 10.0, 10.0
"""Linux: per cent of the last ten seconds in which some task, or every task, waited for memory."""
COMMAND_SECONDS = 5.0


@dataclass(frozen=True)
class Reading:
    """The machine's memory at one moment, in bytes."""

    total_bytes: int
    available_bytes: int
    """What could be given without swapping."""
    swap_used_bytes: int
    swapped_out_bytes: int | None
    """Written to swap since the machine was started."""
    pressure: str | None
    """normal, warning or critical, as the system itself judges; None where it does not say."""
    resident_bytes: int
    """Of this process."""


def read_machine(system: str | None = None) -> Reading:
    """The present state; `system` is platform.system() unless a test says otherwise."""
    system = system or platform.system()
    memory = psutil.virtual_memory()
    if system == "Darwin":
        used, out, pressure = _darwin()
    else:
        swap = psutil.swap_memory()
        used, out = swap.used, swap.sout
        pressure = pressure_from_psi(_text(PRESSURE_FILE))
    return Reading(memory.total, memory.available, used, out, pressure, psutil.Process().memory_info().rss)


def _darwin() -> tuple[int, int | None, str | None]:
    """(swap used, swapped out, pressure) as macOS has it."""
    used = used_from_swapusage(_said("sysctl", "-n", "vm.swapusage"))
    return (
        psutil.swap_memory().used if used is None else used,
        swapouts_from_vm_stat(_said("vm_stat")),
        pressure_from_level(_said("sysctl", "-n", "kern.memorystatus_vm_pressure_level")),
    )


def used_from_swapusage(text: str) -> int | None:
    """`total = 2048.00M  used = 1039.25M  free = 1008.75M  (encrypted)` → bytes used."""
    found = re.search(r"used\s*=\s*([\d.,]+)([KMGT])", text)
    if not found:
        return None
    scale = 1024 ** ("KMGT".index(found[2]) + 1)
    # Some locales write a decimal comma.
    return int(float(found[1].replace(",", ".")) * scale)


def swapouts_from_vm_stat(text: str) -> int | None:
    """Bytes swapped out since the start, from vm_stat's pages."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = re.search(r"^Swapouts:\s+(\d+)\.", text, re.MULTILINE)
    return int(size[1]) * int(pages[1]) if size and pages else None


def pressure_from_level(text: str) -> str | None:
    """macOS: 1, 2 and 4 of kern.memorystatus_vm_pressure_level."""
    return {"1": "normal", "2": "warning", "4": "critical"}.get(text.strip())


def pressure_from_psi(text: str) -> str | None:
    """Linux pressure stall information (kernel documentation, accounting/psi)."""
    values = dict(re.findall(r"^(some|full) avg10=([\d.]+)", text, re.MULTILINE))
    if not values:
        return None
    if float(values.get("full", 0)) >= FULL_CRITICAL:
        return "critical"
    return "warning" if float(values.get("some", 0)) >= SOME_WARNING else "normal"


def out_of_memory_kills() -> int | None:
    """Processes that the Linux kernel has killed for memory since it started; None elsewhere."""
    found = re.search(r"^oom_kill (\d+)$", _text(VMSTAT_FILE), re.MULTILINE)
    return int(found[1]) if found else None


def boot() -> str:
    """Tells one start of the machine from another."""
    return _text(BOOT_ID_FILE).strip() or str(round(psutil.boot_time()))


def _text(path: Path) -> str:
    """A file of /proc, empty where this system has none or does not let it be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _said(*command: str) -> str:
    """A command's output, empty where there is no such command or it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
