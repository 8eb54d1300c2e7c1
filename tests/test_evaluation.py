import itertools

import pytest

from instep.evaluation import Outcome, majority_at_k, pass_at_k, summarise, wilson_interval
from instep.rewards import Verdict


def test_wilson_interval_against_published_values():
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson_interval(20, 20)[1] == 1.0


def test_wilson_interval_refuses_what_is_no_share():
    for bad in ((1, 0), (3, 2), (-1, 5)):
        with pytest.raises(ValueError):
            wilson_interval(*bad)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for samples, correct in ((5, 0), (5, 2), (6, 6), (4, 1)):
        right = [index < correct for index in range(samples)]
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(right, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError):
        pass_at_k(4, 1, 5)


def test_majority_counts_answers_of_the_same_meaning_together():
    answers = ["1,000", "7", "$1000.00", "7.", "1000", None]
    assert majority_at_k(answers, [True, False, True, False, True, False], 6) == 1.0
    assert majority_at_k(answers, [True, False, True, False, True, False], 4) == 0.5  # a tie
    assert majority_at_k(["7", "8", "8"], [True, False, False], 3) == 0.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0


def test_a_summary():
    right = Outcome(Verdict.CORRECT, "4", True, 10, False)
    wrong = Outcome(Verdict.WRONG, "5", True, 20, False)
    cut = Outcome(Verdict.NO_ANSWER, None, False, 30, True)
    metrics = summarise([[right, wrong, right], [wrong, cut, cut]])
    assert metrics["accuracy"] == pytest.approx(1 / 3)
    assert metrics["accuracy_low"], metrics["accuracy_high"] == wilson_interval(2 / 3, 2)
    assert metrics["format_rate"] == pytest.approx(4 / 6)
    assert metrics["no_answer_rate"] == metrics["truncated_share"] == pytest.approx(2 / 6)
    assert metrics["mean_tokens"] == pytest.approx(20)
    assert metrics["pass_at_3"] == metrics["majority_at_3"] == 0.5
    assert "pass_at_1" not in summarise([[right]])
    with pytest.raises(ValueError):
        summarise([[right], [right, wrong]])
