"""No secret in any field of the output; code left alone; the same secret always the same placeholder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from instep.records import Conversation, Message, ToolCall
from instep.sessions.build import load
from instep.sessions.redaction import Redactor, placeholders, redact
from instep.sessions.store import write_conversations

# Made up, and put together here so that no scanner takes this file for a leak.
A36 = "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5"
PEM = (
    "-----BEGIN RSA PRIVATE KEY-----\n"
    + ("MIIEpAIBAAKCAQEA7bq" * 6 + "\n") * 4
    + "-----END RSA PRIVATE KEY-----"
)
SECRETS = {
    "aws-access-key": "AKIA" + "IOSFODNN7EXAMPL2",
    "github-token": "ghp_" + A36,
    "gitlab-token": "glpat-" + "x7Yw2pQ9sT4vB6nM8kLq",
    "huggingface-token": "hf_" + A36[:34],
    "anthropic-api-key": "sk-ant-api03-" + A36 + "-xY_z9",
    "api-key": "sk-proj-" + A36,
    "slack-token": "xoxb-" + "123456789012-abcdefGHIJKL",
    "stripe-key": "sk_live_" + "4eC39HqLyjWDarjtT1zdp7dc",
    "google-api-key": "AIza" + "SyD3f4g5h6j7k8l9q0w1e2r3t4y5u6i7o8p",
    "npm-token": "npm_" + A36,
    "json-web-token": "eyJhbGciOiJIUzI1NiJ9."
    + "eyJzdWIiOiIxMjM0NTY3ODkwIn0."
    + "dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P",
    "private-key": PEM,
    "email": "anna.miller+work@mail.example.com",
}
CONTEXTUAL = {
    "url-password": ("postgres://shop:{}@db.internal:5432/shop", "s3cr3tPassw0rd!"),
    "authorization-header": ("curl -H 'Authorization: Bearer {}'", "tok9f8e7d6c5b4a3928"),
    "environment-secret": ("export STRIPE_WEBHOOK_SECRET={}", "q8w7e6r5t4y3u2i1"),
    "password-field": ('{{"client_secret": "{}"}}', "Zx9Cv8Bn7Mm6Kk5J"),
    "aws-secret-key": ('aws_secret_key = "{}"', "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY12"),
}


def _everywhere(secret: str) -> Conversation:
    """The secret in every field that can hold text."""
    call = ToolCall(
        "run", {"command": f"echo {secret}", "nested": [{"deep": f"x{secret}"}], secret: 1}, f"id {secret}"
    )
    schema = {
        "type": "function",
        "function": {"name": "run", "description": f"Use {secret}", "parameters": {}},
    }
    return Conversation(
        f"session {secret}",
        (
            Message("system", f"Key: {secret}."),
            Message("user", f"My key is {secret}\nuse it"),
            Message(
                "assistant", f"I use {secret}", reasoning=f"so {secret}", tool_calls=(call,), supervised=True
            ),
            Message("tool", f"out {secret}", tool_call_id=f"id {secret}", name="run"),
        ),
        (schema,),
        {"format": "pi", "file": f"/data/{secret}.jsonl", "project": f"/code/{secret}"},
        (f"note {secret}",),
    )


@pytest.mark.parametrize(("kind", "secret"), SECRETS.items())
def test_a_secret_is_nowhere_in_the_output(kind: str, secret: str, tmp_path: Path) -> None:
    conversations, counts = redact([_everywhere(secret)])
    write_conversations(tmp_path / "out.jsonl", conversations)
    written = (tmp_path / "out.jsonl").read_text("utf-8")
    assert secret not in written
    assert json.dumps(secret)[1:-1] not in written
    assert all(part not in written for part in secret.split("\n") if len(part) > 40)
    assert f"[REDACTED:{kind}]" in written
    assert counts[kind] >= 12
    assert conversations[0].messages[2].supervised  # trained to write the placeholder
    assert placeholders(conversations)[kind] == counts[kind]


@pytest.mark.parametrize(("kind", "form", "secret"), [(k, *v) for k, v in CONTEXTUAL.items()])
def test_a_secret_known_by_its_surroundings_goes_everywhere(
    kind: str, form: str, secret: str, tmp_path: Path
) -> None:
    bare = _everywhere(secret)
    source = Conversation("other", (Message("user", form.format(secret)),), source={"format": "pi"})
    conversations, counts = redact([bare, source])  # the telling place comes last
    write_conversations(tmp_path / "out.jsonl", conversations)
    written = (tmp_path / "out.jsonl").read_text("utf-8")
    assert secret not in written
    assert counts[kind] >= 13
    assert set(placeholders(conversations)) == {kind}


def test_secrets_inside_json_text_inside_arguments() -> None:
    inner = json.dumps({"env": f"A=1\nKEY={SECRETS['aws-access-key']}\n", "pem": PEM})
    value = Redactor().value({"arguments": {"body": json.dumps({"data": inner})}})
    text = json.dumps(value)
    assert SECRETS["aws-access-key"] not in text
    assert "MIIEpAIB" not in text


def test_behind_an_escaped_newline() -> None:
    text = json.dumps(
        {"log": f"a\nanna@example.com\n/Users/anna/x\n{SECRETS['aws-access-key']}\t{SECRETS['github-token']}"}
    )
    assert json.loads(Redactor().text(text)) == {
        "log": "a\n[REDACTED:email]\n~/x\n[REDACTED:aws-access-key]\t[REDACTED:github-token]"
    }


def test_an_argument_named_like_a_secret_is_one() -> None:
    assert Redactor().value({"password": "hunter2hunter2", "path": "a.py"}) == {
        "password": "[REDACTED:password-field]",
        "path": "a.py",
    }


def test_home_directories() -> None:
    redactor = Redactor(home=Path("/data/people/bea"))
    value = [
        "/Users/anna/code/x.py and file:///Users/anna",
        r"C:\Users\Carl Jr\x and C:\\Users\\carl\\x",
        "/home/dan/x",
        "cd /home/dan",
        "GET /home/dashboard",
        "--Users-anna-code-- -home-dan-x",
        "/data/people/bea/notes /data/people/beatrix",
        "https://example.com/home/page",
    ]
    redactor.learn(value)
    assert redactor.value(value) == [
        "~/code/x.py and file://~",
        "~ Jr\\x and ~\\\\x",
        "~/x",
        "cd ~",
        "GET /home/dashboard",
        "--~-code-- -~-x",
        "~/notes /data/people/beatrix",
        "https://example.com/home/page",
    ]


@pytest.mark.parametrize(
    "code",
    [
        "git clone git@github.com:org/repo.git",
        "import {x} from '@scope/pkg@1.2.3'; // icon@2x.png",
        "y = weights@inputs.shape",
        'const password = getPassword("user");',
        'token: "string", apiKey: process.env.API_KEY2,',
        "API_KEY=${API_KEY_1}  MAX_TOKENS=4096",
        'sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"',
        "commit 4bf92f3577b34da6a3ce929d0e0e4736b7ad6e21",
        "sk-loading-spinner-circle-container",
        "http://localhost:8080/x@y ssh://host:22/path",
        "postgres://user:${DB_PASSWORD}@host/db",
        "if header.startswith('-----BEGIN PRIVATE KEY-----'): pass",
        "Bearer authentication-scheme-of-http",
        '"key": "ctrl+shift+p", "secret": "secrets/prod.json"',
        '{"integrity": "sha512-oEtJrHGl5sQ8lTzcXG8zjDA5Vn0eQkJ0c1Zv2b3n4M5=="}',
    ],
)
def test_code_is_left_alone(code: str) -> None:
    assert Redactor(home=Path("/root")).text(code) == code


def test_redacting_twice_changes_nothing() -> None:
    texts = [form.format(secret) for form, secret in CONTEXTUAL.values()] + list(SECRETS.values())
    once, _ = redact([Conversation("a", tuple(Message("user", text) for text in texts))])
    twice, counts = redact(once)
    assert twice == once
    assert not counts


def test_hostile_text_takes_no_quadratic_time() -> None:
    texts: list[Any] = [
        "://" * 60_000,
        "a" * 200_000 + "@",
        "a@" * 100_000,
        "-----BEGIN PRIVATE KEY-----" * 5_000,
        "token" * 40_000,
        "password: " * 20_000,
        "eyJ" * 60_000,
        "//x" * 60_000 + ":_authToken=",
        "A_" * 90_000 + "TOKEN",
        "1" * 200_000,
    ]
    started = time.perf_counter()
    redactor = Redactor()
    redactor.learn(texts)
    redactor.value(texts)
    assert time.perf_counter() - started < 20


def test_the_real_session_is_read_in_time(shared_sessions: Path) -> None:
    started = time.perf_counter()
    conversations, report = load(shared_sessions / "pi/large-session.jsonl")
    assert time.perf_counter() - started < 10
    assert report.redactions == {"home-directory": 52}  # no false alarm in a megabyte of code
    assert "badlogic/workspaces" not in str(conversations)


# Values that were found to pass, as they stood in sessions; made up, and put together here.
LEAKS = {
    "credentials file": (
        "[default]\naws_secret_access_key = {}\n",
        "wJa1rXUtnF3MI/K7MD8NG" + "+bPxRf5CYzz9KEY2abc",
    ),
    "at sign in a URL's password": ("postgres://bob:{}@db.local/x", "p@ss:w0rd!9Kx"),
    "key header": ("curl -H 'X-Api-Key: {}' url", "abcDEF123ghiJKL456mnq"),
    "curl's user": ("curl -s -u anna:{} https://db.local", "Tr0ub4dor-and-3x"),
    "netrc": ("machine db.local login anna password {}", "Tr0ub4dor-and-3y"),
    "YAML": ("db:\n  host: local\n  db_password: {}\n  port: 5432", "Tr0ub4dor9and3z"),
}


@pytest.mark.parametrize(
    "harmless",
    [
        "password: string\ntoken: number",
        "  api_key: process.env.API_KEY1\n",
        "const token: AccessToken2 = next();",
        "curl -u $USER:$PASS https://x",
        "curl https://x | jq -u a:b9",
        "secret: tests/fixtures/v2\n",
        "The machine has a login screen; its password dialog is new.",
        "x = a%2Fhomeward%2Fbound",
    ],
)
def test_what_only_looks_like_it_stays(harmless: str) -> None:
    conversations, _ = redact([Conversation("b", (Message("user", harmless),))])
    assert conversations[0].messages[0].content == harmless


def test_a_home_directory_escaped_in_a_url() -> None:
    text = "vscode://file/%2FUsers%2Fanna%2Fcode%2Fmain.py and %2fhome%2fanna%2fx"
    conversations, _ = redact([Conversation("b", (Message("user", text),))])
    assert conversations[0].messages[0].content == "vscode://file/~%2Fcode%2Fmain.py and ~%2fx"


@pytest.mark.parametrize(("form", "secret"), LEAKS.values(), ids=LEAKS)
def test_what_was_found_to_leak_does_not(form: str, secret: str) -> None:
    conversations, _ = redact(
        [_everywhere(secret), Conversation("b", (Message("user", form.format(secret)),))]
    )
    written = json.dumps([[m.content for m in c.messages] for c in conversations])
    assert secret not in written and secret.rpartition("@")[2] not in written and "[REDACTED:" in written


def test_secrets_in_a_list_under_a_telling_name() -> None:
    value = {
        "arguments": {"password": ["Battery4" + "Staple9", "Correct9" + "Horse7x"]},
        "text": "Battery4" + "Staple9",
    }
    redactor = Redactor()
    redactor.learn(value)
    text = json.dumps(redactor.value(value))
    assert "Staple9" not in text and "Horse7x" not in text


@pytest.mark.parametrize(
    "value",
    [
        {"arguments": {"cwd": "/home/janedoe6"}, "text": "I am in /home/janedoe6 now"},
        {"project": "/home/janedoe6", "text": "see /home/janedoe6."},
        {"text": "PATH=/home/janedoe6:/usr/bin"},
        {"text": "/mnt/c/Users/janedoe6/code"},
    ],
)
def test_home_directories_without_a_slash_behind_them(value: Any) -> None:
    redactor = Redactor(home=Path("/root"))
    redactor.learn(value)
    assert "janedoe6" not in json.dumps(redactor.value(value))


def test_a_route_is_no_home_directory() -> None:
    redactor = Redactor(home=Path("/root"))
    value = {"text": "open /home/dashboard in the browser"}
    redactor.learn(value)
    assert redactor.value(value) == value
