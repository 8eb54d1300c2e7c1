"""A loaded model answers: what it is asked with, what ends it, what its settings come from."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import instep
from instep.chat.interrupt import Interrupt
from instep.chat.model import ChatModel, generation_settings
from instep.engines.base import Sampling
from instep.errors import InputError
from instep.records import Message, StopReason

GREEDY = {"temperature": 0.0, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def model(trained_run: Path) -> ChatModel:
    return instep.load(trained_run, engine="torch", **GREEDY)


def test_the_answer_is_the_engines_greedy_completion(model: ChatModel) -> None:
    pieces: list[str] = []
    answer = model.chat("Count to 3", on_text=pieces.append)
    prompt = model.renderer.prompt([Message("user", "Count to 3")])
    ((rollout,),) = model.engine.generate(
        [prompt], 1, Sampling(24, temperature=0.0, stop_tokens=model.renderer.stop_tokens)
    )
    assert answer.tokens.tolist() == rollout.tokens.tolist() and answer.stop is rollout.stop
    ids = rollout.tokens.tolist()
    ids = ids[:-1] if answer.stop is StopReason.END_OF_TURN else ids
    assert answer.text == model.renderer.tokenizer.decode(ids, skip_special_tokens=False) == "".join(pieces)
    assert answer.prompt_tokens == len(prompt) and str(answer) == answer.text
    assert 0 < answer.first_token_seconds <= answer.seconds
    assert len(answer.tokens) < 2 or (answer.tokens_per_second or 0) > 0


def test_a_run_brings_its_model_and_adapter(model: ChatModel, tiny_model: Path) -> None:
    assert model.settings.model.path == str(tiny_model)
    assert model.settings.model.precision == "float32"
    plain = instep.load(tiny_model, engine="torch", model={"precision": "float32"}, **GREEDY)
    base = plain.chat("Count to 3")
    assert model.chat("Count to 3", adapter=False).tokens.tolist() == base.tokens.tolist()
    assert model.chat("Count to 3").tokens.tolist() != base.tokens.tolist()


def test_history_system_and_tools_reach_the_model(model: ChatModel) -> None:
    tool = {"name": "read_file", "description": "Reads.", "parameters": {"type": "object", "properties": {}}}
    messages = [
        {"role": "system", "content": "You count."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "the file"},
        {"role": "user", "content": "Two?"},
    ]
    text = model.renderer.tokenizer.decode(model.prompt(messages, [tool]).tolist(), skip_special_tokens=False)
    for part in ("You count.", "One?", "the file<|im_end|>", "Two?", "read_file"):
        assert part in text
    assert text.endswith("<|im_start|>assistant\n")


def test_a_stop_string_ends_the_answer_and_is_not_in_it(model: ChatModel) -> None:
    whole = model.chat("Count to 3").text
    assert len(whole) > 6
    stop = whole[3:6]
    pieces: list[str] = []
    answer = model.chat("Count to 3", stop_strings=(stop,), on_text=pieces.append)
    assert answer.stop is StopReason.STOP_STRING
    assert answer.text == "".join(pieces) == whole[: whole.index(stop)]
    assert len(answer.tokens) <= len(model.chat("Count to 3").tokens)


def test_the_seed_decides_a_sampled_answer(model: ChatModel) -> None:
    def draw(seed: int) -> list[int]:
        return model.chat("Count", temperature=1.5, max_new_tokens=12, seed=seed).tokens.tolist()

    assert draw(1) == draw(1) != draw(2)


def test_control_c_keeps_what_was_said(model: ChatModel) -> None:
    told = 0

    def tell(_: str) -> None:
        nonlocal told
        told += 1
        if told == 3:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        answer = model.chat("Count to 3", on_text=tell, stop=lambda: interrupt.asked)
    assert answer.stop is StopReason.ABORTED and answer.text
    assert len(answer.tokens) < 24
    assert signal.getsignal(signal.SIGINT) is before


def test_an_answer_has_the_room_that_the_context_leaves(model: ChatModel) -> None:
    prompt = model.prompt("Count")
    tight = instep.chat.model.ChatModel(
        model.engine, model.report, model.renderer, model.folder, model.settings, len(prompt) + 2
    )
    answer = tight.chat("Count", stop_strings=())
    assert len(answer.tokens) <= 2
    with pytest.raises(InputError, match="context"):
        tight.chat("Count and count and count again")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.chat([{"role": "robot", "content": "x"}]), "robot"),
        (lambda m: m.chat([]), "no message"),
        (lambda m: m.chat("x", temperature=-1), "temperature"),
        (lambda m: m.chat("x", tempreature=1), "tempreature"),
        (lambda m: m.chat("x", engine="jax"), "engine cannot change"),
        (lambda m: m.chat("x", temperature=0, top_p=0.5), "top_p would not be used"),
        (lambda m: m.chat("x", stop_strings=("",)), "empty"),
        (lambda m: m.chat("x", tools=[{"nothing": 1}]), "tools"),
    ],
)
def test_wrong_input_is_named(model: ChatModel, call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(model)


def test_settings_of_a_run_an_adapter_folder_and_a_model(trained_run: Path, tiny_model: Path) -> None:
    by_run = generation_settings(None, {"adapter": str(trained_run)})
    by_folder = generation_settings(str(trained_run / "adapter"), {})
    assert by_run.model.path == by_folder.model.path == str(tiny_model)
    assert by_folder.adapter == str(trained_run / "adapter")
    moved = generation_settings(None, {"adapter": str(trained_run), "model.path": "elsewhere", "seed": 5})
    assert (moved.model.path, moved.seed, moved.adapter) == ("elsewhere", 5, str(trained_run))
    assert generation_settings("some/model", {"adapter": str(trained_run)}).model.path == "some/model"
    with pytest.raises(InputError, match="neither a run nor an adapter folder"):
        generation_settings(None, {"adapter": str(tiny_model)})
    with pytest.raises(InputError, match="both bring an adapter"):
        generation_settings(str(trained_run), {"adapter": str(trained_run)})


def test_the_ids_are_int32_and_of_this_model(model: ChatModel) -> None:
    answer = model.chat("Count to 3")
    assert answer.tokens.dtype == np.int32 and answer.tokens.max() < len(model.renderer.tokenizer)
