from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from instep.cli.show import show
from instep.errors import InputError

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(show)

NASTY = "<script>alert(1)</script> & \x1b[31mred\x1b[0m  \n\tend <|im_end|> «guillemets» \u202e"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("show") / "chats.jsonl"
    rows = [
        [("user", f"Count to two, chat {number}. {NASTY}"), ("assistant", f"one two {number} {NASTY}")] * 3
        for number in (7, 8)
    ]
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in row]}) for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: Any) -> str:
    result = run(*arguments)
    assert isinstance(result.exception, InputError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_without_a_terminal_what_is_trained_on_stands_in_guillemets(file: Path, tiny_model: Path) -> None:
    output = run(file, "--model", tiny_model).stdout
    assert "\x1b" not in output and "\u202e" not in output
    assert "── 0 user\n<|im_start|>user↵\nCount to two, chat 7. <script>" in output
    assert "── 1 assistant\n<|im_start|>assistant↵\n«one two 7 <script>" in output
    assert re.search(r"␛\[31mred␛\[0m··↵\n→\s+end <\|im_end\|>", output) and "⟨U+202E⟩<|im_end|>»↵" in output


def test_json_is_one_object_whose_runs_add_up(file: Path, tiny_model: Path) -> None:
    result = run(file, "--model", tiny_model, "--index", 1, "--json")
    shown = json.loads(result.stdout)
    runs = [run for sheet in shown["sheets"] for block in sheet["blocks"] for run in block["runs"]]
    assert sum(run["tokens"] for run in runs) == shown["tokens"]
    assert sum(run["tokens"] for run in runs if run["weight"]) == shown["supervised_tokens"] > 0
    trained = "".join(run["text"] for run in runs if run["weight"])
    assert trained == f"one two 8 {NASTY}<|im_end|>" * 3
    assert [run["text"] for run in runs if run["control"] and run["weight"]] == ["<|im_end|>"] * 3
    assert shown["template"]["end_of_turn"] == "<|im_end|>"


def test_windows_show_every_trained_token_once(file: Path, tiny_model: Path) -> None:
    whole = json.loads(run(file, "--model", tiny_model, "--json").stdout)
    shown = json.loads(run(file, "--model", tiny_model, "--windows", "--max-length", 400, "--json").stdout)
    assert len(shown["sheets"]) > 1
    assert all(sheet["tokens"] <= 400 for sheet in shown["sheets"])
    assert shown["supervised_tokens"] == whole["supervised_tokens"]
    chosen = json.loads(run(file, "--model", tiny_model, "--windows", "--json").stdout)
    assert max(sheet["tokens"] for sheet in chosen["sheets"]) <= 512, "the tiny model's context"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.trained = ""
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name == "href":
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
            if name == "src":
                self.loaded.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["mark"] and "pre" in self.open:
            self.trained += data


def test_the_page_is_whole_escaped_and_loads_nothing(file: Path, tiny_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    result = run(file, "--model", tiny_model, "--html", target)
    assert result.exit_code == 0 and str(target) in result.stdout.replace("\n", "")
    text = target.read_text(encoding="utf-8")
    reader = _Reader()
    reader.feed(text)
    assert (
        reader.open == [] and not reader.loaded and "script" not in reader.tags and "link" not in reader.tags
    )
    assert not re.search(r"https?://|@import|url\(", text)
    assert "\x1b" not in text and "\u202e" not in text
    assert len(reader.ids) == len(set(reader.ids))
    assert {link.removeprefix("#") for link in reader.links} <= set(reader.ids)
    assert reader.trained.count("one two 7 <script>alert(1)</script> & ␛[31m") == 3
    assert "prefers-color-scheme: dark" in text and "Legend" in text and 'lang="en"' in text


def test_a_page_is_not_overwritten_unasked(file: Path, tiny_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("mine")
    assert "exists already" in refused(file, "--model", tiny_model, "--html", target)
    assert target.read_text() == "mine"
    assert run(file, "--model", tiny_model, "--html", target, "--force").exit_code == 0
    assert "mine" not in target.read_text()[:40]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_what_cannot_be_shown_is_said_in_one_line(file: Path, tiny_model: Path, tmp_path: Path) -> None:
    assert "it holds 2 (0 to 1)" in refused(file, "--model", tiny_model, "--index", 5)
    assert "no conversation has an id" in refused(file, "--model", tiny_model, "--id", "nothing-like-it")
    assert "use one" in refused(file, "--model", tiny_model, "--id", "x", "--index", 0)
    assert "is a folder" in refused(file, "--model", tiny_model, "--html", tmp_path)
    assert refused(tmp_path / "absent.jsonl", "--model", tiny_model)
    assert refused(file, "--model", tmp_path / "absent")
    assert "no room" in refused(
        file, "--model", tiny_model, "--windows", "--max-length", 64, "--min-context", 64
    )


def test_a_conversation_is_found_by_its_id(file: Path, tiny_model: Path) -> None:
    names = [
        json.loads(run(file, "--model", tiny_model, "--index", n, "--json").stdout)["conversation"]
        for n in (0, 1)
    ]
    for name in names:
        shown = json.loads(run(file, "--model", tiny_model, "--id", name, "--json").stdout)
        assert shown["conversation"] == name
