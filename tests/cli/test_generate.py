"""`instep generate` and `instep chat` as a user runs them, on a real (tiny) model."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import instep as package

GREEDY = ("--temperature", "0", "--max-new-tokens", "12", "--engine", "torch")


def test_prompt_file_and_stdin_ask_the_same(instep: Any, trained_run: Path, tmp_path: Path) -> None:
    expected = package.load(trained_run, engine="torch", temperature=0.0, max_new_tokens=12).chat(
        "Count to 3"
    )
    shown = instep("generate", "Count to 3", "--adapter", trained_run, *GREEDY, "--stats")
    assert shown.stdout == expected.text + ("" if expected.text.endswith("\n") else "\n")
    assert "first token after" in shown.stderr and "tokens/s" in shown.stderr
    (tmp_path / "ask.txt").write_text("Count to 3\n")
    result = instep("generate", "--file", "ask.txt", "--adapter", trained_run, *GREEDY, "--json")
    value = json.loads(result.stdout)
    assert value["text"] == expected.text and value["completion_tokens"] == len(expected.tokens)
    assert value["engine"] == "torch" and value["adapter"] == str(trained_run)
    piped = subprocess.run(
        [sys.executable, "-m", "instep", "generate", "--adapter", str(trained_run), *GREEDY],
        input="Count to 3\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert piped.stdout == shown.stdout


def test_a_terminal_sees_the_answer_grow_and_no_control_codes(trained_run: Path) -> None:
    """stdout is a pseudo-terminal: several writes, the text the same as without one."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "instep",
        "generate",
        "Count to 3",
        "--adapter",
        str(trained_run),
        *GREEDY,
    ]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait(60) == 0
    text = (
        package.load(trained_run, engine="torch", temperature=0.0, max_new_tokens=12).chat("Count to 3").text
    )
    shown = "".join(f"\\x{ord(one):02x}" if ord(one) < 32 and one not in "\n\t" else one for one in text)
    assert seen.decode().replace("\r\n", "\n").removesuffix("\n") == shown.removesuffix("\n")


def test_chat_reads_lines_from_a_pipe(trained_run: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "instep", "chat", str(trained_run), *GREEDY, "--system", "Be brief."],
        input="Count to 3\n/save talk.jsonl\n/bogus\n",
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    row = json.loads((tmp_path / "talk.jsonl").read_text())
    assert row["messages"][0] == {"role": "system", "content": "Be brief."}
    assert row["messages"][2]["content"] in done.stdout
    assert "/bogus is no command" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "Hi", "--adapter", "nowhere"], "neither a run nor an adapter folder"),
        (["generate", "Hi", "--file", "x"], "both given"),
        (["generate", "--file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["generate", "  "], "the prompt is empty"),
        (["generate", "Hi", "--tools", "bad.json"], "bad.json is not JSON"),
        (["generate", "Hi", "--tools", "odd.json"], "odd.json: tools: expected"),
        (["generate", "Hi", "--temperature", "-1"], "temperature"),
        (["generate", "Hi", "--temperature", "0", "--top-k", "5"], "top_k would not be used"),
        (["generate", "Hi", "--set", "nonsense=1"], "nonsense"),
        (["chat", "no such/model at all"], "no such folder"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    tiny_model: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from instep.cli.app import main

    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "odd.json").write_text('[{"no": "name"}]')
    monkeypatch.chdir(tmp_path)
    more = [] if "--adapter" in arguments or arguments[0] == "chat" else ["--model", str(tiny_model)]
    monkeypatch.setattr(sys, "argv", ["instep", *arguments, *more])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error, error
    assert "Traceback" not in error and len(error.strip().splitlines()) == 1
