"""Evaluation on a scripted engine: what is counted, on which split, and that the layout does not matter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instep.adapters import save_adapter
from instep.config import AdapterSettings, EvaluationSettings
from instep.engines.base import EngineState, LoadReport
from instep.engines.fake import A_NAME, B_NAME, FakeEngine
from instep.errors import InputError
from instep.loops.evaluate import FORMATS, Subject, conclude, measure, result_file, settings_of, store
from instep.loops.listener import StopFlag, Stopped
from instep.records import Message, Rollout, StopReason
from instep.rewards import Rewards
from instep.tasks import Tags, Task
from tests.loops.collector import Collector

TEXTS = (
    "<reasoning>\nr\n</reasoning>\n<answer>\n7\n</answer>",  # the answer of every task, laid out strictly
    "Well: <reasoning>r</reasoning> <answer>7.0</answer>",  # the same answer, laid out loosely
    "<reasoning>\nr\n</reasoning>\n<answer>\n8\n</answer>",
    "I do not know",
    "<reasoning>\nr\n</reasoning>\n<answer>\n7",  # cut: the answer tag is not closed
)


class Texts:
    def decode(self, ids: list[int], **_: Any) -> str:
        return TEXTS[ids[0]]


class Prompts:
    tokenizer = Texts()
    stop_tokens = (63,)

    def prompt(self, messages: tuple[Message, ...], tools: Any = ()) -> np.ndarray:
        return np.array([int(messages[-1].content)], np.int32)


class Scripted:
    """Answers task i by a script: `script(i, sample, adapter's number or None, temperature)` → text's index."""

    def __init__(self, script: Callable[[int, int, int | None, float], int]) -> None:
        self.script, self.loaded, self.batches = script, -1, []

    def load_state(self, state: EngineState) -> None:
        self.loaded = state.step

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, sampling: Any, **more: Any
    ) -> list[list[Rollout]]:
        self.batches.append(len(prompts) * n)
        answers = []
        for prompt in prompts:
            row = []
            for sample in range(n):
                if more["on_token"]:
                    more["on_token"](0, sample, 0)
                adapter = self.loaded if more["adapter"] else None
                text = self.script(int(prompt[0]), sample, adapter, sampling.temperature)
                stop = StopReason.LENGTH if text == 4 else StopReason.END_OF_TURN
                row.append(Rollout(np.array([text, 1, 2], np.int32), np.zeros(3, np.float32), stop))
            answers.append(row)
        return answers


def state(number: int) -> EngineState:
    return EngineState({}, {}, {}, number)


def run(
    script: Callable[[int, int, int | None, float], int],
    tasks: int = 4,
    adapters: dict[str, EngineState] | None = None,
    **changes: Any,
) -> tuple[Any, Collector, Scripted]:
    adapters = adapters or {}
    tree = {"task": {"name": "chain_sum"}, "adapters": dict.fromkeys(adapters, "somewhere"), **changes}
    settings = EvaluationSettings.model_validate(tree)
    made = [Task(f"t{i}", str(i), (Message("user", str(i)),), "7", "made/test") for i in range(tasks)]
    listener, engine = Collector(), Scripted(script)
    with Rewards(FORMATS, Tags(), 64) as rewards:
        subject = Subject(made, "made/test", Prompts(), rewards, Path("model"))  # type: ignore[arg-type]
        judged = measure(settings, subject, engine, adapters, listener, StopFlag())  # type: ignore[arg-type]
        report = LoadReport("fake", "cpu", "float32", 1, 1, 4)
        return conclude(settings, subject, report, judged, 1.0), listener, engine


def test_every_figure_is_what_was_answered_and_names_the_split() -> None:
    evaluation, _, _ = run(lambda task, *_: task, tasks=5)
    figures = evaluation.result["results"]["model"]["greedy"]
    expected = {
        "accuracy": 2 / 5, "format_rate": 3 / 5, "strict_format_rate": 2 / 5, "no_answer_rate": 2 / 5,
        "truncated_share": 1 / 5, "mean_tokens": 3.0,
    }  # fmt: skip
    for name, value in expected.items():
        assert figures[f"made/test {name}"] == pytest.approx(value), name
    assert figures["made/test accuracy_low"] < 0.4 < figures["made/test accuracy_high"]
    assert all(name.startswith("made/test ") for name in figures)
    assert len(evaluation.completions) == 5
    assert (
        evaluation.completions[2]["completion"] == TEXTS[2]
        and evaluation.completions[2]["verdict"] == "wrong"
    )
    assert evaluation.result["settings"]["task"]["name"] == "chain_sum"
    json.dumps(evaluation.result, allow_nan=False)


def test_samples_give_pass_and_majority_beside_the_greedy_answer() -> None:
    # Task 0: 7, 7, 8, nothing; task 1: 8, 8, 7, nothing.
    table = ((0, 1, 2, 3), (2, 2, 0, 3))
    evaluation, _, _ = run(
        lambda task, sample, _, temperature: 2 if temperature == 0 else table[task][sample],
        tasks=2, samples=4, temperature=0.7, k=[1, 2, 4],
    )  # fmt: skip
    modes = evaluation.result["results"]["model"]
    assert modes["greedy"]["made/test accuracy"] == 0
    sampled = {name.removeprefix("made/test "): value for name, value in modes["sampled"].items()}
    assert sampled["accuracy"] == pytest.approx(3 / 8)
    assert sampled["pass_at_1"] == pytest.approx(3 / 8)
    assert sampled["pass_at_2"] == pytest.approx(((1 - 1 / 6) + 1 / 2) / 2)
    assert sampled["pass_at_4"] == 1.0
    assert sampled["majority_at_4"] == 0.5


def test_base_and_every_adapter_stand_side_by_side() -> None:
    adapters = {"format": state(10), "reinforce": state(20)}
    evaluation, listener, _ = run(
        lambda task, _, adapter, __: {None: 3, 10: 2, 20: 0}[adapter], adapters=adapters
    )
    results = evaluation.result["results"]
    assert list(results) == ["base", "format", "reinforce"]
    accuracy = [results[name]["greedy"]["made/test accuracy"] for name in results]
    formats = [results[name]["greedy"]["made/test format_rate"] for name in results]
    assert accuracy == [0, 0, 1] and formats == [0, 1, 1]
    last = listener.records[-1]
    assert last["done"] == last["total"] == 12


def test_the_result_does_not_depend_on_how_many_are_decoded_together() -> None:
    results = []
    for together in (1, 3, 100):
        evaluation, _, engine = run(
            lambda task, sample, *_: (task + sample) % 5, tasks=7, samples=3, completions_per_batch=together
        )
        assert max(engine.batches) <= max(together, 3)
        results.append((evaluation.result["results"], evaluation.completions))
    assert results[0] == results[1] == results[2]


def test_a_stop_ends_the_sampling_at_once() -> None:
    flag, seen = StopFlag(), []

    def script(task: int, *_: Any) -> int:
        seen.append(task)
        flag.requested = len(seen) == 3
        return 0

    settings = EvaluationSettings.model_validate({"task": {"name": "chain_sum"}})
    tasks = [Task(f"t{i}", str(i), (Message("user", str(i)),), "7", "made/test") for i in range(9)]
    with Rewards(FORMATS, Tags(), 64) as rewards, pytest.raises(Stopped):
        subject = Subject(tasks, "made/test", Prompts(), rewards, Path("model"))  # type: ignore[arg-type]
        measure(settings, subject, Scripted(script), {}, Collector(), flag)  # type: ignore[arg-type]
    assert len(seen) == 3


def test_a_stored_result_is_never_overwritten(tmp_path: Path) -> None:
    evaluation, _, _ = run(lambda task, *_: task, tasks=2)
    first = result_file(tmp_path, "my/tasks.jsonl")
    store(evaluation, first)
    assert first.parent == tmp_path / "evaluations" and first.name.endswith("-tasks.json")
    assert json.loads(first.read_text()) == evaluation.result
    assert len(first.with_suffix(".completions.jsonl").read_text().splitlines()) == 2
    assert result_file(tmp_path, "my/tasks.jsonl") != first
    with pytest.raises(InputError, match="never overwritten"):
        store(evaluation, first)


def test_a_run_brings_its_task_format_and_lengths_along(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    engine = FakeEngine()
    adapter = AdapterSettings(rank=2)
    engine.load(None, adapter, None, 0)  # type: ignore[arg-type]
    save_adapter(folder / "adapter", engine.state(), adapter, "some/model")
    assert {A_NAME, B_NAME} == set(engine.state().parameters)
    (folder / "config.toml").write_text(
        'seed = 5\n[model]\npath = "some/model"\n[task]\nname = "chain_sum"\nanswer_tag = "result"\n'
        "parameters = { min_terms = 2 }\n[rollouts]\nmax_new_tokens = 33\n"
    )
    tree, where = settings_of(str(folder))
    assert where == folder
    settings = EvaluationSettings.model_validate(tree)
    assert (settings.seed, settings.max_new_tokens, settings.task.parameters) == (5, 33, {"min_terms": 2})
    assert settings.model.path == "some/model" and settings.adapters == {"adapter": str(folder)}
    elsewhere = settings_of(str(folder), "gsm8k")[0]
    elsewhere["task"]["name"] = "gsm8k"
    other = EvaluationSettings.model_validate(elsewhere)
    assert other.task.answer_tag == "result" and other.task.parameters == {}
    alone, none = settings_of(str(folder / "adapter"))
    assert none is None and alone["model"]["path"] == "some/model"
    assert settings_of("some/model") == ({"model": {"path": "some/model"}}, None)
    (folder / "adapter").rename(tmp_path / "away")
    with pytest.raises(InputError, match="has not finished"):
        settings_of(str(folder))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"greedy": False}, "nothing would be measured"),
        ({"base": False}, "nothing would be measured"),
        ({"samples": 4, "k": [8]}, "k = 8"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EvaluationSettings.model_validate({"task": {"name": "chain_sum"}, **changes})
