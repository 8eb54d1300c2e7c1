"""Conversations to train a tiny model on, and the command as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve short chats in the OpenAI form, in which the answer repeats the question's number."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Count to {number} and then tell me about file {number}."},
                {
                    "role": "assistant",
                    "content": " ".join(map(str, range(1, number + 1))) + f" file {number}",
                },
                {
                    "role": "user",
                    "content": f"Now the same for {number + 1}, please, as chat {number * 7919}.",
                },
                {
                    "role": "assistant",
                    "content": " ".join(map(str, range(1, number + 2))) + f" done {number * 31}",
                },
            ]
        }
        for number in range(3, 15)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Instep = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def instep(tmp_path: Path) -> Instep:
    """Run the installed command in a folder of its own: `instep("sft", "--data", …)`."""

    def run(*arguments: str | Path, check: int | None = 0, env: dict[str, str] | None = None):
        result = subprocess.run(
            [sys.executable, "-m", "instep", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check is not None:
            assert result.returncode == check, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    return run
