"""Does llama.cpp answer from `instep export --to gguf` what instep answers? Greedy text, on a few conversations.

    python benchmarks/export_against_llama_cpp.py [MODEL|RUN] [--engine torch] [--precision f32]

llama.cpp runs in an environment of its own (`peers/requirements-llama-cpp.txt`) and uses the chat template that the
file carries. Ends with exit code 1 where a text differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import harness

import instep
from instep.config import DEFAULT_MODEL

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Name three colours of the rainbow.",
    "Wie heißt die Hauptstadt von Österreich? 日本の首都は？",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", default=DEFAULT_MODEL, help="model or run")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--precision", default="f32", choices=["f16", "f32"])
    parser.add_argument("--tokens", type=int, default=48, help="new tokens an answer (default: 48)")
    parser.add_argument("--work", type=Path, default=harness.default_work_folder())
    wanted = parser.parse_args()
    python = harness.peer_python(wanted.work, harness.PEERS / "requirements-llama-cpp.txt")
    model = instep.load(wanted.source, engine=wanted.engine, **{"model.precision": "float32"})
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ours = [
        model.chat(messages, temperature=0.0, max_new_tokens=wanted.tokens).text for messages in conversations
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        export = [sys.executable, "-m", "instep", "export", wanted.source, "--to", "gguf", "-o", str(file)]
        subprocess.run([*export, "--precision", wanted.precision], check=True)
        job = {"model": str(file), "conversations": conversations, "max_new_tokens": wanted.tokens}
        found = harness.run_worker(python, harness.PEERS / "llama_cpp_answers.py", job, {})
    equal = 0
    for question, a, b in zip(QUESTIONS, ours, found["answers"], strict=True):
        same = a.strip() == b.strip()
        equal += same
        print(f"{'same  ' if same else 'DIFFER'} {question}\n    instep    {a!r}\n    llama.cpp {b!r}")
    print(f"{equal} of {len(QUESTIONS)} answers are the same text ({found['versions']})")
    sys.exit(0 if equal == len(QUESTIONS) else 1)


if __name__ == "__main__":
    main()
