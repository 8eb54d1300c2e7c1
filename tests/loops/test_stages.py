"""The file of stages: inheritance, overrides, where a stage starts from, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instep.config import EvaluationSettings, GrpoSettings, SftSettings
from instep.errors import InputError
from instep.loops.stages import dump_stages, load_stages, open_stages

FILE = """
seed = 3
[adapter]
rank = 4
[task]
name = "gsm8k"
path = "here"

[[stage]]
name = "format"
kind = "sft"
data.demonstrations = 40
max_steps = 5

[[stage]]
name = "reinforce"
kind = "grpo"
max_steps = 7
task.few_shot = [{ question = "q", reasoning = "r", answer = "1" }]

[[stage]]
name = "measure"
kind = "eval"
tasks = 9
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    return path


def test_stages_inherit_what_they_have_a_setting_for(file: Path) -> None:
    first, second, third = load_stages(str(file))
    assert isinstance(first.settings, SftSettings) and isinstance(second.settings, GrpoSettings)
    assert isinstance(third.settings, EvaluationSettings)
    assert [stage.folder for stage in (first, second, third)] == ["1-format", "2-reinforce", "3-measure"]
    assert [stage.start for stage in (first, second, third)] == [None, "format", None]
    assert {stage.settings.seed for stage in (first, second, third)} == {3}
    assert first.settings.adapter.rank == second.settings.adapter.rank == 4
    assert first.settings.task and first.settings.task.path == second.settings.task.path == "here"
    assert len(second.settings.task.few_shot) == 1 and not third.settings.task.few_shot
    assert (first.settings.max_steps, second.settings.max_steps, third.settings.tasks) == (5, 7, 9)


def test_an_override_is_for_every_stage_or_for_one(file: Path) -> None:
    overrides = [
        "seed=8",
        "task.path=there",
        "reinforce.max_steps=2",
        "measure.tasks=3",
        "rollouts.group_size=3",
    ]
    first, second, third = (
        s.settings for s in load_stages(str(file), overrides, {"model.path": "m", "engine": None})
    )
    assert isinstance(first, SftSettings) and isinstance(second, GrpoSettings)
    assert isinstance(third, EvaluationSettings) and first.task
    assert {one.seed for one in (first, second, third)} == {8}
    assert {one.model.path for one in (first, second, third)} == {"m"}
    assert first.task.path == second.task.path == third.task.path == "there"
    assert (first.max_steps, second.max_steps, third.tasks, second.rollouts.group_size) == (5, 2, 3, 3)


def test_a_stage_without_demonstrations_does_not_take_the_task(file: Path) -> None:
    file.write_text(FILE.replace("data.demonstrations = 40", 'data.path = "chats.jsonl"'))
    settings = load_stages(str(file))[0].settings
    assert isinstance(settings, SftSettings) and settings.task is None


def test_resolved_stages_survive_their_file(file: Path, tmp_path: Path) -> None:
    stages = load_stages(str(file), ["format.optimizer.schedule=constant"])
    (tmp_path / "stages.toml").write_text(dump_stages(stages))
    assert load_stages(str(tmp_path / "stages.toml")) == stages


@pytest.mark.parametrize("name", ["gsm8k", "gemma3_gsm8k"])
def test_the_shipped_recipes_are_valid_under_both_of_their_names(name: str) -> None:
    stages = load_stages(name)
    assert stages == load_stages(f"recipes/{name}.toml")
    assert [stage.kind for stage in stages] == ["sft", "grpo", "eval"]


def test_the_gemma_recipe_runs_on_the_jax_engine() -> None:
    for stage in load_stages("gemma3_gsm8k", flags={"engine": "jax"}):
        assert stage.settings.engine == "jax" and stage.settings.model.path == "google/gemma-3-270m"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[stage]]", "[[steps]]", "no stages"),
        ('kind = "grpo"', 'kind = "ppo"', "'ppo': expected one of sft, grpo, eval"),
        ('name = "reinforce"', 'name = "format"', "two stages are called 'format'"),
        ('name = "reinforce"', 'name = "rollouts"', "is also a setting"),
        ("max_steps = 7", "max_stepz = 7", r"stage reinforce: unknown setting 'max_stepz'.*max_steps"),
        ("max_steps = 7", 'start = "later"', r"start = 'later': expected previous, base or one of format"),
        ("max_steps = 5", 'start = "previous"', "no training stage stands before it"),
        ("tasks = 9", 'start = "base"', "start is for sft and grpo"),
        ("max_steps = 7", "adapter.rank = 8", "begins from stage format, so model.path and adapter must be the same"),
        ("max_steps = 7", 'run.folder = "x"', "set by the stages themselves"),
        ("max_steps = 7", 'adapter.start_from = "x"', "set by the stages themselves"),
        ("seed = 3", "sede = 3", "'sede' is a setting of none of the stages"),
        ("data.demonstrations = 40", 'data.demonstrations = 40\ndata.path = "x"', "are both given"),
    ],
)  # fmt: skip
def test_each_mistake_gets_one_clear_line(file: Path, old: str, new: str, words: str) -> None:
    file.write_text(FILE.replace(old, new))
    with pytest.raises(InputError, match=words) as caught:
        load_stages(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["nonsense=1", "later.max_steps=2"])
def test_an_override_that_no_stage_takes_is_an_error(file: Path, override: str) -> None:
    with pytest.raises(InputError, match="neither a setting of a stage nor one of the stages"):
        load_stages(str(file), [override])


def test_a_folder_keeps_its_stages(file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def go(*overrides: str, **more: Any) -> Any:
        return open_stages(run, load_stages(str(file), overrides), resume=True, **more)

    with pytest.raises(InputError, match="is not a run of stages"):
        go()
    open_stages(run, load_stages(str(file)), resume=False)
    go()
    go("reinforce.max_steps=9")
    assert load_stages(str(run / "stages.toml"))[1].settings.max_steps == 9  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"format\.adapter\.rank cannot change"):
        go("adapter.rank=8", "reinforce.max_steps=9")
    (run / "1-format").mkdir()
    (run / "1-format" / "summary.json").write_text('{"finished": true}')
    with pytest.raises(InputError, match=r"format\.max_steps cannot change"):
        go("format.max_steps=6", "reinforce.max_steps=9")
    with pytest.raises(InputError, match="already exists"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "mine.txt").write_text("mine")
        open_stages(tmp_path / "other", load_stages(str(file)), resume=False)
