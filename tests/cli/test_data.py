"""`instep data build` and `report` as a person runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from instep.cli.data import app
from instep.errors import InputError
from instep.sessions.store import read_conversations

FIXTURES = Path(__file__).parents[1] / "sessions/fixtures"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    with pytest.raises(InputError) as caught:
        CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_build_writes_conversations_and_reports(tmp_path: Path) -> None:
    output = tmp_path / "c.jsonl"
    text = run("build", FIXTURES, "-o", output)
    conversations = read_conversations(output)
    assert len(conversations) == 13
    assert f"13 conversations written to {output}" in text.replace("\n", "")
    for expected in (
        "claude-code",
        "abandoned branch",
        "home-directory",
        "supervised turns",
        "--tokenizer MODEL",
    ):
        assert expected in text


def test_json_is_one_object_and_nothing_else(tmp_path: Path) -> None:
    built: dict[str, Any] = json.loads(run("build", FIXTURES, "-o", tmp_path / "c.jsonl", "--json"))
    assert built["conversations"] == 13
    assert built["files"] == 6
    assert built["quarantined"] == {"row with a message of unknown role": 1}
    assert built["supervised_tokens"] is None
    reported: dict[str, Any] = json.loads(run("report", tmp_path / "c.jsonl", "--json"))
    for key in ("conversations", "messages", "assistant_turns", "supervised_turns", "supervised_characters"):
        assert reported[key] == built[key]
    raw: dict[str, Any] = json.loads(run("report", FIXTURES, "--json"))
    assert raw["not_supervised"] == built["not_supervised"]


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    output = tmp_path / "c.jsonl"
    output.write_text("mine")
    assert "exists already" in refused("build", FIXTURES, "-o", output)
    assert output.read_text() == "mine"
    run("build", FIXTURES / "pi_v1.jsonl", "-o", output, "--force")
    assert [conversation.id for conversation in read_conversations(output)] == ["pi-one"]


def test_an_older_output_inside_the_source_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes((FIXTURES / "pi_v1.jsonl").read_bytes())
    for _ in range(2):
        run("build", tmp_path, "-o", tmp_path / "c.jsonl", "--force")
    assert len(read_conversations(tmp_path / "c.jsonl")) == 1


def test_options_reach_the_settings(tmp_path: Path) -> None:
    output = tmp_path / "c.jsonl"
    options = ["--include-reasoning", "--max-message-chars", "11", "--exclude-tool", "read", "--no-redact"]
    run("build", FIXTURES / "pi_v1.jsonl", "-o", output, *options)
    (conversation,) = read_conversations(output)
    assert "7 characters cut" in conversation.messages[1].reasoning
    assert [call.name for call in conversation.messages[1].tool_calls] == ["bash"]
    assert conversation.source["project"] == "/Users/anna/projects/shop"


def test_from_reads_the_agents_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CODEX_HOME", raising=False)
    archive = tmp_path / ".codex/archived_sessions"
    archive.mkdir(parents=True)
    (archive / "rollout-1.jsonl").write_bytes((FIXTURES / "codex.jsonl").read_bytes())
    assert (
        json.loads(run("build", "--from", "codex", "-o", tmp_path / "c.jsonl", "--json"))["conversations"]
        == 2
    )
    assert "no pi sessions found" in refused("build", "--from", "pi", "-o", tmp_path / "d.jsonl")


def test_refusals_name_the_cause(tmp_path: Path) -> None:
    output = tmp_path / "c.jsonl"
    assert "nothing to read" in refused("build", "-o", output)
    assert "does not exist" in refused("build", tmp_path / "no", "-o", output)
    assert "is a folder" in refused("build", FIXTURES, "-o", tmp_path)
    (tmp_path / "x.bin").write_bytes(b"\0\1\2")
    assert "skipped 1 binary" in refused("build", tmp_path, "-o", output)
    assert "skipped 1 binary" in refused("report", tmp_path)
    assert not output.exists()


def test_tokens_are_counted_with_a_tokenizer(tiny_model: Path) -> None:
    from instep.rendering.tokenizer import load_tokenizer

    encode = load_tokenizer(tiny_model).encode
    expected = sum(len(encode(said, add_special_tokens=False)) + 1 for said in (" Four.", "Six."))
    file = FIXTURES / "prompt_completion.jsonl"
    found = json.loads(run("report", file, "--tokenizer", tiny_model, "--json"))
    assert found["supervised_tokens"] == expected
    assert found["tokens"] > expected
    assert f"{expected}│" in run("report", file, "--tokenizer", tiny_model).replace(" ", "")


def test_show_is_mounted() -> None:
    assert "FILE" in run("show", "--help")


def test_importing_the_command_imports_no_heavy_library() -> None:
    heavy = ["torch", "transformers", "mlx", "jax", "detect_secrets", "requests", "tokenizers"]
    code = f"import sys, instep.cli.data; sys.exit(any(name in sys.modules for name in {heavy!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_force_replaces_what_was_built_and_nothing_else(tmp_path: Path) -> None:
    session = tmp_path / "session.jsonl"
    session.write_bytes((FIXTURES / "chat.jsonl").read_bytes())
    output = tmp_path / "c.jsonl"
    run("build", tmp_path, "-o", output)
    built = output.read_bytes()
    run("build", tmp_path, "-o", output, "--force")  # it lies among the sources, but is none
    assert output.read_bytes() == built
    for sources in ([session], [tmp_path]):
        assert "is read by this command" in refused("build", *sources, "-o", session, "--force")
    link = tmp_path / "link.jsonl"
    link.symlink_to(output)
    assert "link or a device" in refused("build", session, "-o", link, "--force")
    assert "link or a device" in refused("build", session, "-o", "/dev/null", "--force")
    assert "is read by this command" in refused("show", output, "--html", output, "--force")
    assert session.read_bytes() == (FIXTURES / "chat.jsonl").read_bytes()
    assert link.is_symlink() and output.read_bytes() == built


def test_a_reader_that_has_had_enough_is_no_traceback(tmp_path: Path) -> None:
    turns = [{"role": role, "content": "word " * 2000} for role in ("user", "assistant") * 20]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"messages": turns}) + "\n")
    command = f"{sys.executable} -m instep data show {file} | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
