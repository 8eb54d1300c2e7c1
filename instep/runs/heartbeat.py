"""A run's last sign of life, and what it tells about a run that ended without a word.

`.heartbeat.json` in the run folder is rewritten every few seconds while a run trains, and once more at its end.
A process that was killed (by the kernel for memory, by Metal's abort, by a power cut) cannot say so: the next
start compares the last beat with the machine as it is then.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from instep.runs.machine import Reading, boot, out_of_memory_kills

HEARTBEAT = ".heartbeat.json"
LITTLE_SHARE = 0.06
"""Less available memory than this share of all is scarce."""


@dataclass(frozen=True)
class Heartbeat:
    pid: int
    boot: str
    """Which start of the machine."""
    started: str
    """Local time with its offset, ISO 8601."""
    beat: str
    step: int
    doing: str
    reading: Reading
    swap_grown_bytes: int
    kills: int | None
    """Processes that the kernel had killed for memory (Linux)."""
    ended: str | None = None
    """None while it runs; finished, stopped, or the error."""


def first_beat(reading: Reading, step: int, doing: str) -> Heartbeat:
    now = _now()
    return Heartbeat(os.getpid(), boot(), now, now, step, doing, reading, 0, out_of_memory_kills())


def next_beat(last: Heartbeat, reading: Reading, step: int, doing: str, swap_grown_bytes: int) -> Heartbeat:
    return replace(
        last, beat=_now(), step=step, doing=doing, reading=reading, swap_grown_bytes=swap_grown_bytes,
        kills=out_of_memory_kills(),
    )  # fmt: skip


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    """Replace the file. Not synced to the disk: it is no state, and the disk should not work for it."""
    path = folder / HEARTBEAT
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    temporary.replace(path)


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """The last one; None where there is none, or it is torn or of another version."""
    try:
        tree = json.loads((folder / HEARTBEAT).read_text(encoding="utf-8"))
        return Heartbeat(**{**tree, "reading": Reading(**tree["reading"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def silent_end(last: Heartbeat | None) -> str | None:
    """Why the run that left this beat ended without a word, as far as can be told; None where it said how it ended.

    Only for a run that no process is training now.
    """
    if last is None or last.ended is not None:
        return None
    reading, kills = last.reading, out_of_memory_kills()
    free = f"{_gb(reading.available_bytes)} of {_gb(reading.total_bytes)} were free"
    held = f"it held {_gb(reading.resident_bytes)}, {free}"
    if last.swap_grown_bytes > 0:
        held += f", swap had grown by {_gb(last.swap_grown_bytes)}"
    scarce = reading.pressure == "critical" or reading.available_bytes < LITTLE_SHARE * reading.total_bytes
    if last.boot != boot():
        why = "the machine was started anew since: a power cut, a crash or a shutdown"
    elif kills is not None and last.kills is not None and kills > last.kills:
        why = "the kernel has killed a process for memory since"
    elif scarce or last.swap_grown_bytes > 0:
        why = "memory was scarce: most likely it was killed for that (on a Mac, Metal ends a process that runs out)"
    else:
        why = "it was killed from outside, or crashed; memory was not scarce"
    when = datetime.fromisoformat(last.beat).strftime("%Y-%m-%d %H:%M:%S")
    return f"the last run ended without a word after {when}, step {last.step}, {last.doing}: {why} ({held})"


def is_about_memory(last: Heartbeat | None) -> bool:
    """Whether a lower memory setting is the advice for this silent end."""
    end = silent_end(last)
    return end is not None and ("memory since" in end or "memory was scarce" in end)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
