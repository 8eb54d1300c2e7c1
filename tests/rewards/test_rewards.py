"""Rewards as a run uses them: what each one says, and how each thing that can go wrong is reported."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from instep.config import RewardSettings, TaskSettings
from instep.errors import InputError, TrainingError
from instep.records import Message, Rollout, StopReason
from instep.rewards import Rewards
from instep.tasks import Tags, Task, load_tasks

TAGS = Tags()
GOOD = TAGS.write("2 + 2", "4")
ALL = ("correctness", "integer", "strict_format", "soft_format", "tag_count", "length", "valid_tool_call")
GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


def task(answer="4", tools=(), **columns):
    return Task("t/0", "2+2?", (Message("user", "2+2?"),), answer, "t", tools=tools, columns=columns)


def rollout(text, tokens=10, stop=StopReason.END_OF_TURN):
    return Rollout(np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), stop, text)


def score(name, texts, tasks=None, max_new_tokens=100, folder=".", tokens=None, **settings):
    tasks = tasks or [task()] * len(texts)
    rollouts = [
        rollout(text, length) for text, length in zip(texts, tokens or [10] * len(texts), strict=True)
    ]
    with Rewards(RewardSettings(functions=(name,), **settings), TAGS, max_new_tokens, folder) as rewards:
        return rewards.score(tasks, rollouts)[name].tolist()


def write(folder, text):
    (folder / "mine.py").write_text(text)
    return "mine.py:f"


def test_formats():
    loose = "Sure! <reasoning>2 + 2</reasoning> <answer>4</answer> Bye."
    hidden = "<reasoning>\na\n</reasoning>\n<answer>\nb</answer>\n<answer>\n4\n</answer>"
    empty = "<reasoning>\n \n</reasoning>\n<answer>\n4\n</answer>"
    texts = [GOOD, GOOD + "\n", loose, hidden, empty, "4", "<answer>\n4\n</answer>"]
    assert score("strict_format", texts) == [1, 1, 0, 0, 0, 0, 0]
    assert score("soft_format", texts) == [1, 1, 1, 1, 0, 0, 0]
    assert score("tag_count", texts) == [1, 1, 1, 0.5, 1, 0, 0.5]


def test_correctness_and_integer():
    texts = [GOOD, TAGS.write("?", "4.0 apples"), TAGS.write("?", "4.5"), TAGS.write("?", "many"), "none"]
    assert score("correctness", texts) == [1, 1, 0, 0, 0]
    assert score("integer", texts) == [1, 1, 0, 0, 0]
    assert np.isnan(score("integer", [GOOD], [task("1/3")])[0])


def test_length_punishes_the_last_tokens_linearly():
    assert score("length", [GOOD] * 5, tokens=[10, 80, 90, 100, 120], overlong_tokens=20) == [
        0,
        0,
        -0.5,
        -1,
        -1,
    ]
    assert score("length", [GOOD] * 2, tokens=[75, 100]) == [0, -1]  # a quarter of max_new_tokens


def test_tool_calls_are_checked_against_the_schema():
    calls = {
        '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>': 1,
        '<tool_call>[{"name": "search", "arguments": {"query": "x", "limit": 3}}]</tool_call>': 1,
        '{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}': 1,
        '<answer>{"name": "search", "arguments": {"query": "x"}}</answer>': 1,
        '<tool_call>{"name": "search", "arguments": {"query": 3}}</tool_call>': 0,
        '<tool_call>{"name": "search", "arguments": {}}</tool_call>': 0,
        '<tool_call>{"name": "search", "arguments": {"query": "x", "other": 1}}</tool_call>': 0,
        '<tool_call>{"name": "find", "arguments": {"query": "x"}}</tool_call>': 0,
        '<tool_call>{"name": "search"</tool_call>': 0,
        "[]": 0,
        "[" * 100_000: 0,
        "no call": 0,
    }
    tasks = [task(tools=(SEARCH,))] * len(calls)
    assert score("valid_tool_call", list(calls), tasks) == list(calls.values())
    assert np.isnan(score("valid_tool_call", ["no tools"])[0])


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_gold_answers_of_gsm8k_earn_every_maximum(split):
    if not GSM8K.is_dir():
        pytest.skip("shared/data/gsm8k is not beside the checkout")
    tasks = getattr(load_tasks(TaskSettings(name="gsm8k", path=str(GSM8K)), 0), split)
    assert_gold_is_best(tasks.take(len(tasks)))


@pytest.mark.parametrize(
    "name",
    [
        "chain_sum", "gsm_symbolic", "basic_arithmetic", "decimal_arithmetic", "fraction_simplification",
        "complex_arithmetic", "polynomial_equations", "simple_integration", "countdown", "puzzle24",
        "tower_of_hanoi", "word_ladder", "n_queens", "spiral_matrix", "knights_knaves", "time_intervals",
        "dice", "mini_sudoku",
    ],
)  # fmt: skip
def test_the_gold_answers_of_reasoning_gym_earn_every_maximum(name):
    pytest.importorskip("reasoning_gym")
    settings = TaskSettings(name=name, test_size=6, train_size=6)
    assert_gold_is_best(load_tasks(settings, 0).test.take(6))


def assert_gold_is_best(tasks):
    assert tasks
    texts = [TAGS.write(each.solution or "Therefore.", each.answer) for each in tasks]
    with Rewards(RewardSettings(functions=ALL), TAGS, 512) as rewards:
        results = rewards.score(tasks, [rollout(text) for text in texts])
    for name, values in results.items():
        best = 0.0 if name == "length" else 1.0
        assert ((values == best) | np.isnan(values)).all(), name
    assert not np.isnan(results["correctness"]).any()


def test_a_dataset_with_several_right_answers_accepts_each():
    pytest.importorskip("reasoning_gym")
    tasks = load_tasks(TaskSettings(name="countdown", test_size=3), 0).test.take(3)
    turned = [TAGS.write("?", f"({each.answer})*1") for each in tasks]  # uses a number that is not given
    bracketed = [TAGS.write("?", f"0+0+({each.answer})") for each in tasks]
    same = [TAGS.write("?", f"-(-({each.answer}))") for each in tasks]
    assert score("correctness", turned + bracketed + same, tasks * 3) == [0] * 6 + [1] * 3
    evil = "__import__('os').system('echo')"
    assert score("correctness", [TAGS.write("?", evil)], tasks[:1]) == [0]


def test_a_function_of_ones_own_gets_the_documented_arguments(tmp_path):
    (tmp_path / "beside.py").write_text("FACTOR = 2.0\n")
    name = write(
        tmp_path,
        "from beside import FACTOR\n"
        "import numpy as np\n"
        "def f(prompts, completions, messages, columns):\n"
        "    print('a print does no harm', flush=True)\n"
        "    assert prompts == ['2+2?'] * 3 and messages[0] == [{'role': 'user', 'content': '2+2?'}]\n"
        "    assert columns['answer'] == ['4'] * 3 and columns['completion_tokens'] == [10] * 3\n"
        "    assert columns['truncated'] == [False] * 3 and columns['level'] == [7, 7, None]\n"
        "    return [FACTOR * len(completions[0]), None, np.float32(1.5)]\n",
    )
    values = score(name, ["ab", "c", "d"], [task(level=7), task(level=7), task()], folder=tmp_path)
    assert values[0] == 4.0 and np.isnan(values[1]) and values[2] == 1.5


HEAD = "def f(prompts, completions, messages, columns):\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import no_such_module_at_all\n", "cannot be imported: ModuleNotFoundError.*mine.py, line 1"),
        ("def f(:\n", "cannot be imported: SyntaxError"),
        ("def g(completions): pass\n", "has no function 'f'; it has g"),
        ("f = 3\n", "has no function 'f'"),
        (
            "def f(prompts, completions): return []\n",
            "cannot be called as f\\(prompts, completions, messages, columns",
        ),
        ("async def f(prompts, completions, messages, columns): return []\n", "async"),
        ("import os\nos._exit(3)\n", "ended with code 3"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_once(tmp_path, text, expected):
    name = write(tmp_path, text)
    with pytest.raises(InputError, match=expected):
        Rewards(RewardSettings(functions=(name,)), TAGS, 100, tmp_path)


def test_a_file_or_name_that_is_not_there_is_refused():
    with pytest.raises(InputError, match=r"there is no file .*nowhere\.py"):
        Rewards(RewardSettings(functions=("nowhere.py:f",)), TAGS, 100)
    with pytest.raises(InputError, match="did you mean correctness"):
        Rewards(RewardSettings(functions=("corectness",)), TAGS, 100)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    return [1.0]\n", "returned 1 values for 3 samples"),
        ("    return 'abc'\n", "returned a str; expected a list"),
        ("    return [1.0, 'x', 2.0]\n", "returned 'x' for a sample"),
        ("    return None\n", "returned a NoneType; expected a list"),
        ("    return [1.0, float('nan'), 2.0]\n", "returned nan.*completion 'two'"),
        ("    return [1.0, 2.0, float('inf')]\n", "returned inf.*completion 'three'"),
        (
            "    return [1 / (text != 'two') for text in completions]\n",
            "ZeroDivisionError.*line 2.*t/1.*'two'",
        ),
        ("    import os; os._exit(9)\n", "ended with code 9"),
    ],
)
def test_a_failing_function_stops_with_the_sample_that_caused_it(tmp_path, body, expected):
    name = write(tmp_path, HEAD + body)
    tasks = [Task(f"t/{i}", "?", (Message("user", "?"),), "4", "t") for i in range(3)]
    with pytest.raises(TrainingError, match=expected) as caught:
        score(name, ["one", "two", "three"], tasks, folder=tmp_path)
    assert "mine.py:f" in str(caught.value) and "\n" not in str(caught.value)


def test_a_function_that_hangs_is_killed_with_what_it_started(tmp_path):
    name = write(
        tmp_path,
        HEAD + "    import subprocess, pathlib, time\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "    while True: time.sleep(1)\n",
    )
    start = time.monotonic()
    with pytest.raises(TrainingError, match=r"mine\.py:f: took longer than 2 seconds and was killed"):
        score(name, ["one"], folder=tmp_path, timeout_seconds=2.0)
    assert time.monotonic() - start < 20
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(pid)


def _running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().split()[2] != "Z"  # a zombie has ended


def test_a_users_file_named_like_a_module_of_python_harms_nothing(tmp_path, monkeypatch):
    (tmp_path / "inspect.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = write(tmp_path, HEAD + "    return [1.0]\n")
    assert score(name, ["one"], folder=tmp_path) == [1.0]


def test_answers_are_needed_by_those_that_compare():
    for functions, needed in ((("soft_format",), False), (("soft_format", "integer"), True)):
        with Rewards(RewardSettings(functions=functions), TAGS, 100) as rewards:
            assert rewards.needs_answers is needed
