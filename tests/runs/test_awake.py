"""Keeping awake, with helpers that behave like the real ones: scripts on the PATH that write what happens to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instep.runs import awake
from instep.runs.awake import KeepAwake, awake_command

INHIBIT = """#!/bin/sh
# Like systemd-inhibit: options, then a command that the lock lasts as long as.
for option in "$@"; do case "$option" in --*) shift;; *) break;; esac; done
echo "held $*" >> "{log}"
"$@"
echo released >> "{log}"
"""
CAFFEINATE = """#!/bin/sh
# Like caffeinate -w PID: ends with that process, or when it is told to.
trap 'echo released >> "{log}"; exit 0' TERM
echo "held $*" >> "{log}"
while kill -0 "$3" 2>/dev/null; do sleep 0.05; done
echo released >> "{log}"
"""
SYSTEMS = {"Linux": ("systemd-inhibit", INHIBIT), "Darwin": ("caffeinate", CAFFEINATE)}


@pytest.fixture(params=["Linux", "Darwin"])
def helper(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """(system, log of its helper)."""
    name, script = SYSTEMS[request.param]
    log, folder = tmp_path / "log", tmp_path / "bin"
    folder.mkdir()
    (folder / name).write_text(script.format(log=log))
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(awake, "SYSTEMD", tmp_path)
    return request.param, log


def lines(log: Path, count: int) -> list[str]:
    """The log, once it has so many lines."""
    for _ in range(500):
        found = log.read_text().splitlines() if log.exists() else []
        if len(found) >= count:
            return found
        time.sleep(0.02)
    pytest.fail(f"only {found} in the log")


def test_the_machine_is_held_awake_for_as_long_as_the_block_lasts(helper: tuple[str, Path]) -> None:
    system, log = helper
    with KeepAwake(system) as keeper:
        assert lines(log, 1)[0].startswith("held")
        assert keeper.failed() is None
        assert len(log.read_text().splitlines()) == 1
    assert lines(log, 2)[1] == "released"


def test_an_exception_releases_it(helper: tuple[str, Path]) -> None:
    system, log = helper
    with pytest.raises(RuntimeError), KeepAwake(system):
        lines(log, 1)
        raise RuntimeError
    assert lines(log, 2)[1] == "released"


def test_a_killed_run_releases_it(helper: tuple[str, Path], tmp_path: Path) -> None:
    system, log = helper
    program = (
        "import pathlib, time\nfrom instep.runs import awake\n"
        f"awake.SYSTEMD = pathlib.Path({str(tmp_path)!r})\n"
        f"with awake.KeepAwake({system!r}):\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    lines(log, 1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert lines(log, 2)[1] == "released"


def test_the_right_command_is_chosen(helper: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    system, _ = helper
    command = awake_command(system, 123)
    assert command is not None
    if system == "Darwin":
        assert command[1:] == ["-dimsu", "-w", "123"]
    else:
        assert "--what=idle:sleep" in command and "--mode=block" in command
    monkeypatch.setenv("PATH", "/nowhere")
    assert awake_command(system, 123) is None
    assert awake_command("Plan9", 123) is None
    with KeepAwake(system) as keeper:
        assert keeper.failed() is None


def test_without_systemd_nobody_is_asked(helper: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "SYSTEMD", Path("/nowhere"))
    assert awake_command("Linux", 1) is None


def test_a_helper_that_ends_early_is_told_once(helper: tuple[str, Path], tmp_path: Path) -> None:
    system, _ = helper
    name, _ = SYSTEMS[system]
    (tmp_path / "bin" / name).write_text("#!/bin/sh\necho 'Failed to inhibit: access denied' >&2\nexit 1\n")
    with KeepAwake(system) as keeper:
        for _ in range(500):
            if why := keeper.failed():
                break
            time.sleep(0.02)
        assert why == "Failed to inhibit: access denied"
        assert keeper.failed() is None
