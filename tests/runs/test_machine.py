"""Memory as the machine tells it, the watch over it, and the last sign of life."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from instep.runs import heartbeat as heartbeats
from instep.runs.heartbeat import Heartbeat, first_beat, read_heartbeat, silent_end, write_heartbeat
from instep.runs.machine import (
    Reading,
    pressure_from_level,
    pressure_from_psi,
    read_machine,
    swapouts_from_vm_stat,
    used_from_swapusage,
)
from instep.runs.watch import MemoryWatch

GB = 10**9
CALM = Reading(16 * GB, 8 * GB, 0, 0, "normal", 2 * GB)

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               13405.
Pages occupied by compressor:            211402.
Swapins:                                 100000.
Swapouts:                                250000.
"""


def test_what_macos_says_is_read_rightly() -> None:
    line = "total = 3072.00M  used = 1824.50M  free = 1247.50M  (encrypted)\n"
    assert used_from_swapusage(line) == int(1824.5 * 2**20)
    assert used_from_swapusage("total = 2,00G  used = 1,50G  free = 0,50G") == int(1.5 * 2**30)
    assert used_from_swapusage("") is None
    assert swapouts_from_vm_stat(VM_STAT) == 250000 * 16384
    assert swapouts_from_vm_stat("nothing") is None
    assert [pressure_from_level(text) for text in ("1\n", "2\n", "4\n", "")] == [
        "normal",
        "warning",
        "critical",
        None,
    ]


def test_what_linux_says_is_read_rightly() -> None:
    text = "some avg10={} avg60=0.00 avg300=0.00 total=1\nfull avg10={} avg60=0.00 avg300=0.00 total=1\n"
    assert pressure_from_psi(text.format("0.00", "0.00")) == "normal"
    assert pressure_from_psi(text.format("15.20", "1.00")) == "warning"
    assert pressure_from_psi(text.format("40.00", "22.00")) == "critical"
    assert pressure_from_psi("") is None


def test_macos_is_asked_by_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {
        "sysctl": 'case "$2" in vm.swapusage) echo "total = 2048.00M  used = 100.00M  free = 1948.00M";;'
        " kern.memorystatus_vm_pressure_level) echo 2;; *) exit 1;; esac",
        "vm_stat": f"cat <<'END'\n{VM_STAT}END",
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    reading = read_machine("Darwin")
    assert reading.swap_used_bytes == 100 * 2**20
    assert reading.swapped_out_bytes == 250000 * 16384
    assert reading.pressure == "warning"
    assert 0 < reading.available_bytes <= reading.total_bytes and reading.resident_bytes > 0


def test_this_machine_can_be_read() -> None:
    reading = read_machine()
    assert 0 < reading.available_bytes <= reading.total_bytes
    assert reading.resident_bytes > 10**6 and reading.swap_used_bytes >= 0


class Swapping:
    """Readings whose swap in use is set by the test."""

    def __init__(self) -> None:
        self.now = CALM

    def swap(self, used: float, available: float = 8) -> None:
        self.now = replace(CALM, swap_used_bytes=int(used * GB), available_bytes=int(available * GB))

    def __call__(self) -> Reading:
        return self.now


def make_watch(folder: Path, machine: Swapping, seconds: float = 60) -> MemoryWatch:
    return MemoryWatch(folder, seconds, GB, lambda: (7, "training"), machine)


def test_growing_swap_raises_an_alarm_each_time_it_has_grown_by_as_much(tmp_path: Path) -> None:
    machine = Swapping()
    machine.swap(3)
    watch = make_watch(tmp_path, machine)
    seen = []
    for used in (3, 3.9, 4.1, 4.5, 5.0, 5.2, 5.3):
        machine.swap(used)
        watch.look()
        seen.append(watch.take_alarm())
    assert seen == [False, False, True, False, False, True, False]
    assert watch.swap_grown_bytes == int(2.3 * GB)


def test_a_pause_ends_when_swap_falls_or_memory_becomes_free(tmp_path: Path) -> None:
    machine = Swapping()
    watch = make_watch(tmp_path, machine)
    machine.swap(2, available=1)
    watch.look()
    assert watch.take_alarm() and not watch.eased
    machine.swap(1.6, available=1.5)
    watch.look()
    assert not watch.eased
    machine.swap(1.4, available=1.5)
    watch.look()
    assert watch.eased
    machine.swap(2, available=2.1)
    watch.look()
    assert watch.eased


def test_the_thread_looks_by_itself_and_says_how_the_run_ended(tmp_path: Path) -> None:
    machine = Swapping()
    watch = make_watch(tmp_path, machine, seconds=0.01)
    watch.start()
    beat = read_heartbeat(tmp_path)
    assert beat and beat.ended is None and beat.pid == os.getpid() and beat.step == 7
    machine.swap(2)
    for _ in range(500):
        if watch.take_alarm():
            break
        watch._done.wait(0.01)
    else:
        pytest.fail("the thread has not looked")
    watch.stop("stopped")
    beat = read_heartbeat(tmp_path)
    assert beat and beat.ended == "stopped" and beat.swap_grown_bytes == 2 * GB
    assert silent_end(beat) is None


def beat_of(reading: Reading = CALM, **more: object) -> Heartbeat:
    return replace(first_beat(reading, 41, "training"), **more)  # type: ignore[arg-type]


def test_a_silent_end_is_explained_from_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "out_of_memory_kills", lambda: 3)
    calm = silent_end(beat_of())
    assert calm and "step 41" in calm and "not scarce" in calm
    assert "kernel has killed" in str(silent_end(beat_of(kills=2)))
    assert "started anew" in str(silent_end(beat_of(boot="another start")))
    scarce = replace(CALM, available_bytes=GB // 2)
    assert "memory was scarce" in str(silent_end(beat_of(scarce)))
    assert "memory was scarce" in str(silent_end(beat_of(replace(CALM, pressure="critical"))))
    assert "swap had grown by 2.0 GB" in str(silent_end(beat_of(swap_grown_bytes=2 * GB)))
    assert silent_end(None) is None
    assert heartbeats.is_about_memory(beat_of(kills=2)) and not heartbeats.is_about_memory(beat_of())


def test_a_torn_heartbeat_is_none(tmp_path: Path) -> None:
    beat = beat_of()
    write_heartbeat(tmp_path, beat)
    assert read_heartbeat(tmp_path) == beat
    file = tmp_path / heartbeats.HEARTBEAT
    file.write_text(file.read_text()[:40])
    assert read_heartbeat(tmp_path) is None
