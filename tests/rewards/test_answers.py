"""The one extractor: what counts as the same answer, what does not, and what is no answer at all."""

import time

import pytest

from instep.rewards import Judge, Verdict
from instep.rewards.answers import compare, extract_answer, parse_number
from instep.rewards.arithmetic import arithmetic, reaches
from instep.rewards.symbolic import to_latex
from instep.tasks import Tags

TAGS = Tags()

SAME = [
    ("1,080", "1080"),
    ("$1,080.00", "1080"),
    ("1 080", "1080"),
    ("18 dollars", "18"),
    ("$18 every day at the market.", "18"),
    ("−5", "-5"),
    ("- 5", "-5"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("**72**", "72"),
    ("72.", "72"),
    ("\\boxed{72}", "72"),
    ("\\text{72 clips}", "72"),
    ("48/2 = 24", "24"),
    ("x = 5", "5"),
    ("3/4", "0.75"),
    ("1 1/2", "1.5"),
    ("1½", "3/2"),
    ("$\\frac{3}{4}$", "3/4"),
    ("-\\dfrac{3}{4}", "-0.75"),
    (".5", "1/2"),
    ("0.333333", "1/3"),
    ("50%", "50"),
    ("2.5 million", "2500000"),
    ("1e3", "1000"),
    ("5km", "5"),
    ("Hello   World", "hello world"),
    ('{"a": [1, 2]}', '{"a":[1,2]}'),
    ("x + 1", "x+1"),
]
DIFFERENT = [
    ("5", "-5"),
    ("1080.5", "1080"),
    ("3.0000001", "3"),
    ("1000001", "1000000"),
    ("12 or 13", "12"),
    ("12, 13", "12"),
    ("3/4", "3"),
    ("24/7", "24"),
    ("5²", "52"),
    ("1 2", "12"),
    ("1 12", "11 2"),
    ("0.5", "50"),
    ("2 million", "2"),
    ("10:30", "10"),
    ("1.2.3", "1.2"),
    ("5!", "5"),
    ("v2", "2"),
    ("", "5"),
    ("yes", "no"),
    ("1/0", "0"),
    ('{"a": 2}', '{"a": 1}'),
    ("0.33", "1/3"),
]


@pytest.mark.parametrize(("given", "gold"), SAME)
def test_the_same_answer_written_otherwise(given, gold):
    assert compare(given, gold) is True


@pytest.mark.parametrize(("given", "gold"), DIFFERENT)
def test_another_answer(given, gold):
    assert not compare(given, gold)


def test_the_last_closed_answer_tag_is_the_answer():
    assert extract_answer("I write <answer> tags. <answer>4</answer>", TAGS) == "4"
    assert extract_answer("<answer>3</answer> no: <answer>\n4\n</answer> done 9", TAGS) == "4"
    assert extract_answer("<result>7</result>", Tags("think", "result")) == "7"


def test_an_answer_that_is_not_there_is_none():
    for text in ("", "I do not know 42", "<answer></answer>", "<answer> \n</answer>"):
        assert extract_answer(text, TAGS) is None
    # A completion that was cut inside the answer: its number may be cut too.
    assert extract_answer("<reasoning>the answer is 12</reasoning>\n<answer>12", TAGS) is None


def test_a_model_that_knows_no_tags_can_still_answer():
    assert extract_answer("So 3 + 4 = 7.\n#### 7", TAGS) == "7"
    assert extract_answer("thus \\boxed{\\frac{1}{2}}", TAGS) == "\\frac{1}{2}"
    assert extract_answer("The answer is 3. No: the answer is 7.5 dollars. Bye", TAGS) == "7.5 dollars"


@pytest.fixture(scope="module")
def judge():
    judge = Judge(TAGS, timeout_seconds=20)
    yield judge
    judge.close()


@pytest.mark.parametrize(
    ("given", "gold", "verdict"),
    [
        ("(x+1)**2", "x^2 + 2x + 1", Verdict.CORRECT),
        ("2*sqrt(2)", "\\sqrt{8}", Verdict.CORRECT),
        ("4 - 1", "3", Verdict.CORRECT),
        ("\\pi/2", "pi/2", Verdict.CORRECT),
        ("x**3/3 + C", "x**3/3 + C", Verdict.CORRECT),
        ("x^2 + 2x", "x^2 + 2x + 1", Verdict.WRONG),
        ("2x", "2", Verdict.WRONG),
    ],
)
def test_algebra_decides_where_text_cannot(judge, given, gold, verdict):
    assert judge.verdict(f"<answer>{given}</answer>", gold) is verdict


def test_no_answer_is_apart_from_a_wrong_one(judge):
    assert judge.verdict("I give up", "3") is Verdict.NO_ANSWER
    assert judge.verdict("<answer>4</answer>", "3") is Verdict.WRONG


@pytest.mark.parametrize(
    "text",
    [
        "9**9**9",
        "9^{9^{9}}",
        "(9^9)^{999}",
        "9^9^9",
        "100000!",
        "9" * 3000,
        "(" * 1500,
        "1e999",
        "{" * 1500,
        "[" * 1900,
        "__import__('os').system('touch pwned')",
        "\\sum_{i=1}^{10^9} i",
        "\\int x dx",
        "x^{y^{z}}",
        "2^{9999999}",
        "-" * 1500 + "1",
    ],
)
def test_what_could_run_away_is_wrong_and_quick(judge, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    judge.verdict("<answer>x+1</answer>", "1+x")  # the worker is up
    start = time.monotonic()
    assert judge.verdict(f"<answer>{text}</answer>", "3") is Verdict.WRONG
    assert judge.verdict(f"<answer>{text}</answer>", "x+2") is Verdict.WRONG
    assert time.monotonic() - start < 5
    assert not list(tmp_path.iterdir()) and judge.timeouts == 0


def test_the_judge_works_off_the_main_thread():
    import threading

    verdicts = []
    judge = Judge(TAGS, timeout_seconds=20)
    thread = threading.Thread(
        target=lambda: verdicts.append(judge.verdict("<answer>2(x+1)</answer>", "2x+2"))
    )
    thread.start()
    thread.join()
    judge.close()
    assert verdicts == [Verdict.CORRECT]


def test_a_comparison_that_does_not_end_is_wrong_counted_and_survived(monkeypatch):
    judge = Judge(TAGS, timeout_seconds=0.5)
    monkeypatch.setattr(judge, "_ask", lambda function, *_: Judge._ask(judge, "time:sleep", 60))
    assert judge.verdict("<answer>x+1</answer>", "x+2") is Verdict.WRONG
    assert judge.timeouts == 1
    judge.close()


def test_powers_are_bounded_but_ordinary_ones_pass():
    assert to_latex("x^10") == "x^{10}" and to_latex("x**2 + 1") is not None
    assert to_latex("x^{1/2}") is not None
    assert to_latex("5!") is None and to_latex("2^{1001}") is None and to_latex("(2^{40})^{40}") is None


def test_arithmetic_is_read_and_not_run():
    assert arithmetic("94*4 - 61 - 6") == (309, [94, 4, 61, 6])
    assert arithmetic("(1 + 2) × 3 ÷ 2")[0] == 4.5
    for text in ("9**9**9", "print(1)", "1/0", "a+1", "1.5+2", "True+1", "(" * 150, "lambda: 0", ""):
        assert arithmetic(text) is None
    assert reaches("4*94-6-61", [6, 61, 94, 4], 309)
    assert not reaches("309", [6, 61, 94, 4], 309) and not reaches(
        "94*4 - 61 - 6 - 6 + 6", [6, 61, 94, 4], 309
    )


def test_a_degenerate_run_of_digits_is_no_number():
    assert parse_number("9" * 1000) is None
