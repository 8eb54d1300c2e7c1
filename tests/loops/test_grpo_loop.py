"""The GRPO loop on the fake engine: reward rises, nothing depends on the layout, silent failures are loud."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instep.config import GrpoSettings
from instep.engines.base import ShapeRules
from instep.engines.fake import VOCABULARY, FakeEngine
from instep.errors import TrainingError
from instep.loops.grpo import GrpoData, GrpoLoop
from instep.loops.listener import StopFlag
from instep.records import Message
from instep.rewards import Rewards
from instep.rollouts import has_signal, make_batches
from instep.runs.checkpoint import Progress, load_checkpoint
from instep.runs.folder import RunFolder
from instep.runs.metrics import read_metrics
from instep.settings_file import dump_settings
from instep.tasks import Tags, Task, Tasks, TaskSet
from tests.loops.collector import Collector

STOP = 63

REWARD = '''
def small(prompts, completions, messages, columns):
    """The share of symbols below 16: what there is to learn."""
    return [sum(int(w) < 16 for w in c.split()) / max(1, len(c.split())) for c in completions]


def same(prompts, completions, messages, columns):
    return [0.5] * len(completions)


def fails(prompts, completions, messages, columns):
    return [1 / 0] * len(completions)
'''


class Numbers:
    """A tokenizer whose words are its ids."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


class Prompts:
    """Renders a question, which is a list of ids."""

    tokenizer = Numbers()
    stop_tokens = (STOP,)

    def prompt(self, messages: tuple[Message, ...], tools: Any = ()) -> np.ndarray:
        return np.array([int(word) for word in messages[-1].content.split()], np.int32)


def make_task(index: int) -> Task:
    question = f"{index % 50} {(index * 7) % 50} {(index * 11) % 50}"
    return Task(f"task-{index}", question, (Message("user", question),), "", "made")


def make_loop(
    folder: Path,
    engine: Any,
    changes: dict[str, Any] | None = None,
    listener: Any = None,
    reward: str = "small",
) -> GrpoLoop:
    tree: dict[str, Any] = {
        "max_steps": 25,
        "tasks_per_step": 4,
        "evaluation_tasks": 16,
        "model": {"precision": "float32"},
        "adapter": {"rank": 8, "alpha": 16},
        "optimizer": {"learning_rate": 0.05},
        "rewards": {"functions": [f"rewards.py:{reward}"]},
        "rollouts": {"group_size": 8, "max_new_tokens": 12},
        "run": {"checkpoint_every_steps": 4, "evaluate_every_steps": 10},
        **(changes or {}),
    }
    settings = GrpoSettings.model_validate(tree)
    file = folder.parent / "rewards.py"
    file.write_text(REWARD)
    rewards = Rewards(settings.rewards, Tags(), settings.rollouts.max_new_tokens, folder.parent)
    tasks = Tasks(
        TaskSet("made/train", 200, make_task), TaskSet("made/test", 16, lambda i: make_task(1000 + i))
    )
    run = RunFolder.create(folder, dump_settings(settings))
    engine.load(settings.model, settings.adapter, settings.optimizer, settings.seed)
    return GrpoLoop(
        engine, "float32", GrpoData(tasks, Prompts(), rewards), settings, run, listener or Collector(), Progress()  # type: ignore[arg-type]
    )  # fmt: skip


def test_reward_rises_and_sampler_and_trainer_agree(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "run", FakeEngine())
    assert loop.train(StopFlag())
    records = [r for r in read_metrics(loop.run.metrics) if r["kind"] == "train"]
    first, last = (np.mean([r["reward"] for r in part]) for part in (records[:3], records[-3:]))
    assert first < 0.45 and last > 0.75
    assert max(r["log_ratio_max"] for r in records) < 1e-5
    before, after = loop.progress.first_validation, loop.progress.last_validation
    assert before and after and after["reward"] > before["reward"] + 0.2
    assert load_checkpoint(loop.run.checkpoint("best"))[1].step == loop.progress.best_step
    table = [json.loads(line) for line in (loop.run.path / "rollouts.jsonl").read_text().splitlines()]
    assert len(table) == 25 * 4 * 8
    assert {"step", "task", "completion", "rewards", "advantage", "stop"} <= set(table[0])
    for name in ("reward/rewards.py:small", "kl", "clip_low_share", "truncated_share"):
        assert name in records[0]


def test_every_call_of_the_sampler_has_noise_of_its_own(tmp_path: Path) -> None:
    """Also where a task comes again: more steps than an epoch has."""
    named: list[tuple[int, int]] = []

    class Watched(FakeEngine):
        def generate(self, prompts: Any, n: Any, sampling: Any, keys: Any = None, **more: Any) -> Any:
            named.extend((sampling.seed, key) for key in keys)
            return super().generate(prompts, n, sampling, keys=keys, **more)

    loop = make_loop(tmp_path / "run", Watched(), {"max_steps": 5, "evaluation_tasks": 0})
    tasks = Tasks(TaskSet("made/train", 8, make_task), loop.data.tasks.test)
    loop.data = replace(loop.data, tasks=tasks)
    assert loop.train(StopFlag())
    loop.close()
    assert len(set(named)) == len(named) == 5 * 4


@pytest.mark.parametrize("variant", ["grpo", "bnpo", "dapo", "dr_grpo", "gspo"])
def test_every_variant_learns(tmp_path: Path, variant: str) -> None:
    objective = {"variant": variant, "beta": 0.0, "iterations": 2}
    changes = {"objective": objective, "evaluation_tasks": 0, "watchdog_steps": 99}
    if variant == "dr_grpo":  # its constant denominator makes small steps
        changes["max_steps"] = 40
    loop = make_loop(tmp_path / "run", FakeEngine(), changes)
    assert loop.train(StopFlag())
    rewards = [r["reward"] for r in read_metrics(loop.run.metrics)]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15


def test_the_step_does_not_depend_on_the_token_budget(tmp_path: Path) -> None:
    ends = []
    for budget in (13, 60, 4096):
        engine = FakeEngine()
        loop = make_loop(tmp_path / str(budget) / "run", engine, {"tokens_per_batch": budget, "max_steps": 3}) if (
            (tmp_path / str(budget)).mkdir() is None
        ) else None  # fmt: skip
        assert loop and loop.train(StopFlag())
        ends.append(engine.state().parameters)
    for name, value in ends[0].items():
        for other in ends[1:]:
            np.testing.assert_allclose(value, other[name], rtol=1e-5, atol=1e-7)


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    whole = FakeEngine()
    changes = {"max_steps": 8, "evaluation_tasks": 0}
    reference = make_loop(tmp_path / "whole", whole, changes)
    assert reference.train(StopFlag())
    stop = StopFlag()
    first = make_loop(tmp_path / "parts", FakeEngine(), changes, Collector(stop, 3))
    assert not first.train(stop)
    first.close()
    state, progress = load_checkpoint(first.run.checkpoint("last"))
    assert progress.step == 3 and progress.task_cursor == 12
    second = FakeEngine()
    second.load(first.settings.model, first.settings.adapter, first.settings.optimizer, 0)
    second.load_state(state)
    again = GrpoLoop(second, "float32", first.data, first.settings, first.run, Collector(), progress)
    assert again.train(StopFlag())
    expected = whole.state().parameters
    for name, value in second.state().parameters.items():
        assert np.array_equal(value, expected[name]), name
    tables = [(run / "rollouts.jsonl").read_text() for run in (tmp_path / "parts", tmp_path / "whole")]
    again.close()
    reference.close()
    assert tables[0] == tables[1]


def test_a_reward_that_never_differs_stops_with_advice(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "run", FakeEngine(), {"watchdog_steps": 3}, reward="same")
    before = loop.engine.state().parameters
    with pytest.raises(TrainingError, match=r"rewards that differ.*group_size"):
        loop.train(StopFlag())
    assert loop.progress.step == 3
    after = loop.engine.state().parameters
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_completions_that_are_always_cut_stop_with_advice(tmp_path: Path) -> None:
    changes = {"watchdog_steps": 3, "rollouts": {"group_size": 4, "max_new_tokens": 1}}
    loop = make_loop(tmp_path / "run", FakeEngine(), changes)
    loop.data.renderer.stop_tokens = ()  # type: ignore[misc]
    with pytest.raises(TrainingError, match=r"cut at rollouts\.max_new_tokens = 1"):
        loop.train(StopFlag())
    Prompts.stop_tokens = (STOP,)


def test_a_failing_reward_stops_the_run_with_its_cause(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "run", FakeEngine(), {"evaluation_tasks": 0}, reward="fails")
    with pytest.raises(TrainingError, match=r"rewards\.py:fails.*ZeroDivisionError.*task-\d+"):
        loop.train(StopFlag())


class Skewed(FakeEngine):
    """Samples at another temperature than it says: the bug that a ratio check is for."""

    def generate(self, prompts: Any, n: int, sampling: Any, *rest: Any, **more: Any) -> Any:
        return super().generate(prompts, n, replace(sampling, temperature=0.7), *rest, **more)


def test_an_off_policy_step_is_refused_before_its_update(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "run", Skewed(), {"evaluation_tasks": 0})
    before = loop.engine.state().parameters
    with pytest.raises(TrainingError, match="sampler and trainer disagree"):
        loop.train(StopFlag())
    after = loop.engine.state().parameters
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_groups_without_spread_are_resampled_where_asked(tmp_path: Path) -> None:
    counts = []
    for name, changes in (("drop", {}), ("resample", {"no_spread": "resample", "max_resamples": 5})):
        base = {"max_steps": 4, "evaluation_tasks": 0, "rollouts": {"group_size": 2, "max_new_tokens": 2}}
        loop = make_loop(tmp_path / name, FakeEngine(), base | changes)
        assert loop.train(StopFlag())
        records = [r for r in read_metrics(loop.run.metrics) if r["kind"] == "train"]
        counts.append((np.mean([r["groups_with_spread_share"] for r in records]), loop.progress.rollouts))
    assert counts[0][0] < 0.9 and counts[1][0] > counts[0][0] and counts[1][1] > counts[0][1]


def test_masked_truncated_completions_have_no_site(tmp_path: Path) -> None:
    loop = make_loop(tmp_path / "run", FakeEngine(), {"objective": {"truncated": "mask"}})
    stream_tasks = [make_task(index) for index in range(4)]
    from instep.rollouts import sample_rollouts, sampling_of, score_groups

    sampling = sampling_of(loop.settings.rollouts, (STOP,), 0)
    sampled = sample_rollouts(loop.engine, Prompts(), stream_tasks, 8, sampling, range(4))  # type: ignore[arg-type]
    groups = score_groups(loop.data.rewards, stream_tasks, sampled, loop.settings.rewards, True)
    batches, denominator = make_batches(
        groups, loop.settings.objective, loop.settings.rewards, 12, 4096, ShapeRules(8, 8)
    )
    ended = sum(r.stop != "length" for g in groups for r in g.rollouts)
    tokens = sum(
        len(r.tokens)
        for g in groups
        if has_signal(g, loop.settings.rewards)
        for r in g.rollouts
        if r.stop != "length"
    )
    assert 0 < ended < 32
    assert denominator == ended  # grpo: one for every sequence that is trained
    assert sum(one.batch.supervised_tokens for one in batches) == tokens
    assert VOCABULARY > STOP
