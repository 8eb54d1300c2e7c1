"""`instep doctor`: engines checked against stored values, faults named, secrets kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from instep.cli.app import app
from instep.engines import ENGINES, Known
from instep.loops import doctor

THERE = [name for name, known in ENGINES.items() if importlib.util.find_spec(known.package)]


@pytest.mark.parametrize("name", THERE)
def test_every_engine_takes_the_stored_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = doctor.tiny_model(tmp_path)
    found = doctor.check_engine(name, model)
    assert found["level"] in ("ok", "warning") and "self-check passed" in found["value"], found
    monkeypatch.setattr(doctor, "LOSSES", tuple(loss * 1.001 for loss in doctor.LOSSES))
    found = doctor.check_engine(name, model)
    assert "self-check FAILED" in found["value"]


def test_an_engine_that_cannot_be_imported_or_aborts_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Known("instep.engines.no_such_module", "Engine", "json", ("cpu",))
    monkeypatch.setitem(ENGINES, "broken", broken)
    finding = doctor._engine("broken")
    # The process that checks it has its own table, in which the engine is not known.
    assert finding.level == "problem" and finding.advice
    missing = Known("instep.engines.none", "Engine", "no_such_package_at_all", ("cpu",))
    monkeypatch.setitem(ENGINES, "missing", missing)
    assert doctor._engine("missing").value.startswith("not installed")


def test_versions_that_do_not_go_together_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor._version
    changed = {"mlx": "0.40.0", "mlx-cpu": "0.32.4", "transformers": "4.40.0"}
    monkeypatch.setattr(doctor, "_version", lambda name: changed.get(name) or real(name))
    (problem,) = [finding for finding in doctor._packages() if finding.level == "problem"]
    assert "mlx 0.40.0 with mlx-cpu 0.32.4 (must be the same)" in problem.value
    assert "transformers 4.40.0 (needs >=5.20)" in problem.value


def test_the_token_is_present_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "Abc1Def2Ghi3Jkl4Mno5Pqr6Stu7Vwx8"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(doctor, "HUB_SECONDS", 0.2)
    done = CliRunner().invoke(app, ["doctor", "--engine", THERE[0], "--json"])
    assert done.exit_code in (0, 1), done.output
    findings = {one["name"]: one for one in json.loads(done.output)["findings"]}
    assert findings["Hub token"]["value"] == "present" and token not in done.output
    assert findings[f"engine {THERE[0]}"]["level"] != "problem"
    assert {"machine", "memory", "disk for runs", "packages", "Hub"} <= findings.keys()
    done = CliRunner().invoke(app, ["doctor", "--engine", "tensorflow"])
    assert "expected one of" in str(done.exception)
