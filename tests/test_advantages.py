import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from instep.advantages import combine, group_relative, has_spread, leave_one_out

NAN = float("nan")


def test_mean_and_sample_standard_deviation():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 2.0])
    expected = (rewards - 0.8) / (np.sqrt(((rewards - 0.8) ** 2).sum() / 4) + 1e-4)
    np.testing.assert_allclose(group_relative(rewards), expected, rtol=1e-6)
    np.testing.assert_allclose(group_relative(rewards, scale_by_std=False), rewards - 0.8, rtol=1e-6)


def test_a_group_without_spread_has_no_advantage():
    for rewards in ([0.1 + 0.2, 0.3, 0.3], [1e6, 1e6, 1e6 + 1e-4], [NAN, 1.0, NAN], [NAN, NAN]):
        total = np.array(rewards)
        assert not has_spread(total)
        assert not group_relative(total).any() and not leave_one_out(total).any()


def test_a_rollout_that_no_reward_applies_to_is_left_out():
    total = np.array([1.0, NAN, 0.0])
    np.testing.assert_allclose(group_relative(total, scale_by_std=False), [0.5, 0.0, -0.5])
    np.testing.assert_allclose(leave_one_out(total), [1.0, 0.0, -1.0])


def test_a_reward_that_does_not_apply_is_neutral():
    rewards = {
        "a": np.array([1.0, 0.0, NAN, 1.0]),
        "b": np.array([NAN] * 4),
        "c": np.array([0.0, 0.0, 0.0, 1.0]),
    }
    weights = {"a": 3.0, "b": 5.0, "c": 0.5}
    np.testing.assert_allclose(combine(rewards, weights.__getitem__), [3.0, 0.0, 2.0, 3.5])
    assert np.isnan(combine({"b": rewards["b"]}, weights.__getitem__)).all()


def test_a_reward_of_weight_zero_only_logs():
    rewards = {"a": np.array([1.0, 0.0]), "logged": np.array([0.0, 9.0])}
    np.testing.assert_allclose(combine(rewards, lambda name: float(name == "a")), [1.0, 0.0])
    with pytest.raises(ValueError):
        combine(rewards, lambda name: 0.0)


@given(arrays(np.float64, st.integers(2, 12), elements=st.floats(-100, 100)))
def test_advantages_sum_to_zero_and_keep_the_order(rewards):
    for advantage in (group_relative(rewards), group_relative(rewards, False), leave_one_out(rewards)):
        assert abs(float(advantage.sum(dtype=np.float64))) < 1e-3
        if has_spread(rewards):
            assert rewards[advantage.argmax()] == pytest.approx(rewards.max(), abs=1e-4)
