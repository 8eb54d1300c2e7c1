"""Tasks: what is read, what is kept apart, in which order it is handed out, and what is refused."""

import json
from pathlib import Path

import pytest

from instep.config import TaskSettings
from instep.errors import InputError
from instep.tasks import Tags, TaskStream, check_tags_closed, demonstration, load_tasks, question_hash

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def gsm8k(folder, train, test):
    for name, questions in (("train", train), ("test", test)):
        rows = [{"question": q, "answer": f"<<1+1=2>>Two.\n#### {i:,}"} for i, q in enumerate(questions, 1)]
        write(folder / f"{name}.jsonl", rows)
    return TaskSettings(name="gsm8k", path=str(folder))


def numbers(n, start=0):
    return [{"prompt": f"What is {i} + 1?", "answer": i + 1} for i in range(start, start + n)]


def test_the_real_gsm8k():
    if not GSM8K.is_dir():
        pytest.skip("shared/data/gsm8k is not beside the checkout")
    tasks = load_tasks(TaskSettings(name="gsm8k", path=str(GSM8K)), 0)
    assert (len(tasks.train), len(tasks.test), tasks.notes) == (7473, 1319, ())
    first = tasks.train.get(0)
    assert first is not None and first.answer == "72"
    assert "<<" not in first.solution and first.solution.startswith("Natalia sold 48/2 = 24 clips in May.")
    assert [message.role for message in first.messages] == ["system", "user"]
    assert Tags().write("...", "...") in first.messages[0].content


def test_a_test_question_found_in_training_is_dropped_and_counted(tmp_path):
    settings = gsm8k(tmp_path, ["How  MANY a?", "b?", "b?", "c?"], ["how many a?", "d?"])
    tasks = load_tasks(settings, 0)
    assert [task.question for task in tasks.train.take(9)] == ["b?", "c?"]
    assert len(tasks.test) == 2
    assert tasks.notes[0].startswith("1 training tasks dropped: their question is held out")
    with pytest.raises(InputError, match="no training task is left"):
        load_tasks(gsm8k(tmp_path, ["a?"], ["a?"]), 0)


def test_gsm8k_from_the_hubs_cache(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    snapshot = tmp_path / "datasets--openai--gsm8k" / "snapshots" / "abc"
    (snapshot / "main").mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    for split in ("train", "test"):
        table = pyarrow.table({"question": [f"{split}?"], "answer": ["One.\n#### 1"]})
        parquet.write_table(table, snapshot / "main" / f"{split}-00000-of-00001.parquet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    tasks = load_tasks(TaskSettings(name="openai/gsm8k"), 0)
    assert (tasks.train.get(0).question, tasks.test.get(0).answer) == ("train?", "1")


def test_gsm8k_that_is_nowhere_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"openai/gsm8k.*set task\.path to a folder"):
        load_tasks(TaskSettings(name="gsm8k"), 0)


def test_reasoning_gym_keeps_held_out_questions_out_of_training():
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    tasks = load_tasks(TaskSettings(parameters=parameters, test_size=100, train_size=2000), 0)
    held_out = {question_hash(task.question) for task in tasks.test.take(100)}
    assert len(held_out) == 100
    stream = TaskStream(tasks.train, 0)
    seen = stream.take(2000 - 1)
    assert stream.cursor > 2000 - 1 and tasks.train.dropped
    assert not held_out & {question_hash(task.question) for task in seen}


def test_the_held_out_tasks_do_not_change_with_the_seed_but_the_training_tasks_do():
    first, second = (load_tasks(TaskSettings(test_size=5), seed) for seed in (1, 20_000))
    assert first.test.take(5) == second.test.take(5)
    assert first.train.take(5) != second.train.take(5)


def test_a_small_question_space_is_halved():
    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = load_tasks(TaskSettings(parameters=parameters, test_size=300), 0)
    assert 60 < len(tasks.test) < 110 and "different questions" in tasks.notes[0]
    assert len({task.question for task in TaskStream(tasks.train, 0).take(500)}) > 60


def test_the_order_depends_on_the_seed_alone_and_resumes_at_the_cursor(tmp_path):
    settings = TaskSettings(name=write(tmp_path / "own.jsonl", numbers(40)))
    train = load_tasks(settings, 0).train
    whole = [task.id for task in TaskStream(train, 5).take(100)]
    assert whole != [task.id for task in TaskStream(train, 6).take(100)]
    size = len(train)
    assert sorted(whole[:size]) == sorted(whole[size : 2 * size]) and whole[:size] != whole[size : 2 * size]
    stream = TaskStream(train, 5)
    stream.take(33)
    again = TaskStream(load_tasks(settings, 0).train, 5, stream.cursor)
    assert [task.id for task in again.take(67)] == whole[33:]


def test_a_stream_of_nothing_but_held_out_questions_ends_with_advice(tmp_path):
    from instep.tasks.task import TaskSet

    train = load_tasks(TaskSettings(name=write(tmp_path / "own.jsonl", numbers(40))), 0).train
    hashes = frozenset(question_hash(task.question) for task in train.take(40))
    with pytest.raises(InputError, match="held out for testing; make the held-out set smaller"):
        TaskStream(TaskSet("x", len(train), train.take(40).__getitem__, hashes), 0).take(1)


def test_a_file_of_ones_own(tmp_path):
    rows = [
        {"prompt": "a\u2028b?", "answer": 0, "level": 3},
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "c?"}],
            "answer": "x",
        },
    ]
    test = write(tmp_path / "test.jsonl", numbers(1))
    tasks = load_tasks(TaskSettings(name=write(tmp_path / "own.jsonl", rows), test_path=test), 0)
    first, second = tasks.train.take(2)
    assert (first.question, first.answer, first.columns) == ("a\u2028b?", "0", {"level": 3})
    assert [message.content for message in second.messages] == ["Be brief.", "c?"]


def test_the_held_out_share_stays_where_it_is_when_tasks_are_added(tmp_path):
    few = load_tasks(TaskSettings(name=write(tmp_path / "few.jsonl", numbers(100))), 0)
    many = load_tasks(TaskSettings(name=write(tmp_path / "many.jsonl", numbers(300, start=-100))), 0)
    before = {task.question for task in few.test.take(99)}
    assert 0 < len(before) < 30
    assert before <= {task.question for task in many.test.take(300)}


def test_few_shot_examples_and_tags_are_configurable(tmp_path):
    settings = TaskSettings(
        name=write(tmp_path / "own.jsonl", numbers(30)),
        reasoning_tag="think",
        answer_tag="final",
        few_shot=({"question": "1+1?", "reasoning": "One and one.", "answer": "2"},),  # type: ignore[arg-type]
    )
    messages = load_tasks(settings, 0).train.take(1)[0].messages
    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert "<think>" in messages[0].content and "<reasoning>" not in messages[0].content
    assert messages[2].content == "<think>\nOne and one.\n</think>\n<final>\n2\n</final>"
    bare = settings.model_copy(update={"system_prompt": "", "few_shot": ()})
    assert len(load_tasks(bare, 0).train.take(1)[0].messages) == 1


def test_a_prompt_that_opens_a_tag_is_refused(tmp_path):
    name = write(tmp_path / "own.jsonl", numbers(30))
    with pytest.raises(
        InputError, match=r"system message: the prompt opens <reasoning> and does not close it"
    ):
        load_tasks(TaskSettings(name=name, system_prompt="Begin: <reasoning>"), 0)
    check_tags_closed("<reasoning></reasoning>", Tags(), "here")
    with pytest.raises(InputError, match="opens <answer>"):
        check_tags_closed("<answer>1</answer> now you: <answer>", Tags(), "here")


def test_a_demonstration_supervises_the_answer_in_the_asked_for_format(tmp_path):
    task = load_tasks(gsm8k(tmp_path, ["a?"], ["b?"]), 0).train.take(1)[0]
    conversation = demonstration(task, Tags())
    assert [message.supervised for message in conversation.messages] == [False, False, True]
    assert conversation.messages[-1].content == "<reasoning>\nTwo.\n</reasoning>\n<answer>\n1\n</answer>"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "a?"}, "own.jsonl:1: a task without an answer"),
        ({"prompt": "a?", "answer": " "}, "a task without an answer"),
        ({"prompt": "a?", "answer": [1]}, "'answer' must be a text or a number"),
        ({"question": "a?", "answer": 1}, "expected either 'prompt' or 'messages'"),
        ({"prompt": " ", "answer": 1}, "the prompt is empty"),
        ({"prompt": 3, "answer": 1}, "'prompt' must be a text"),
        ({"messages": [], "answer": 1}, "must be a list"),
        ({"messages": [{"role": "bot", "content": "a"}], "answer": 1}, "a message is a role"),
        (
            {"messages": [{"role": "assistant", "content": "a"}], "answer": 1},
            "must end with a user or tool message",
        ),
        ({"prompt": "a?", "answer": 1, "task": "x"}, "the column 'task' is filled in"),
        ({"prompt": "a?", "answer": 1, "tools": [{"name": "x"}]}, "a tool must be"),
        (
            {"prompt": "a?", "answer": 1, "tools": [{"function": {"name": "x", "parameters": {"type": 3}}}]},
            "not a JSON schema",
        ),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, expected):
    with pytest.raises(InputError, match=expected) as caught:
        load_tasks(TaskSettings(name=write(tmp_path / "own.jsonl", [row])), 0)
    assert "\n" not in str(caught.value)


def test_answers_may_be_missing_where_no_reward_needs_them(tmp_path):
    rows = [{"prompt": f"{i}?"} for i in range(40)]
    tasks = load_tasks(TaskSettings(name=write(tmp_path / "own.jsonl", rows)), 0, answers_required=False)
    assert tasks.train.take(1)[0].answer == ""


def test_bad_files_are_named(tmp_path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a", "answer": 1}\n{"prompt": \n')
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, expected in (
        (broken, "broken.jsonl:2: not JSON"),
        (empty, "has no task in it"),
        (binary, "not UTF-8"),
        (tmp_path / "none.jsonl", "no such file"),
    ):
        with pytest.raises(InputError, match=expected):
            load_tasks(TaskSettings(name=str(path)), 0)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "chain_sums"}, "did you mean chain_sum"),
        ({"name": "gsm8"}, "gsm8k"),
        ({"name": "chain_sum", "parameters": {"terms": 3}}, "unknown to chain_sum, which has .*min_terms"),
        ({"name": "chain_sum", "parameters": {"min_terms": 9}}, "refuses the parameters.*max_terms"),
        ({"name": "chain_sum", "parameters": {"seed": 9}}, "set by the run's seed"),
        ({"name": "propositional_logic"}, "a task without answers"),
    ],
)
def test_an_unknown_dataset_or_parameter_gets_the_right_names(settings, expected):
    with pytest.raises(InputError, match=expected):
        load_tasks(TaskSettings(**settings), 0)


def test_a_gsm8k_row_without_an_answer(tmp_path):
    settings = gsm8k(tmp_path, ["a?"], ["b?"])
    write(tmp_path / "train.jsonl", [{"question": "a?", "answer": "Two."}])
    with pytest.raises(InputError, match=r"train\.jsonl:1: a task without an answer"):
        load_tasks(settings, 0)


def test_settings_that_the_task_would_not_use_are_refused():
    for bad in (
        {"name": "chain_sum", "path": "x"},
        {"name": "gsm8k", "parameters": {"a": 1}},
        {"answer_tag": "reasoning"},
    ):
        with pytest.raises(ValueError):
            TaskSettings(**bad)
