"""llama.cpp's greedy answers to chat messages, from a GGUF file. Runs under the peer's Python.

Usage: python llama_cpp_answers.py JOB.json RESULT.json (see `harness.run_worker`).
"""

from __future__ import annotations

from typing import Any

import harness
import xllamacpp


def answers(job: dict[str, Any]) -> dict[str, Any]:
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
    server = xllamacpp.Server(params)
    found = []
    for messages in job["conversations"]:
        request = {
            "messages": messages,
            "max_tokens": job["max_new_tokens"],
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
        }
        answer = server.handle_chat_completions(request)
        found.append(answer["choices"][0]["message"]["content"])
    return {"versions": harness.versions("xllamacpp"), "answers": found}


if __name__ == "__main__":
    harness.answer(answers)
