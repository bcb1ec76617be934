"""Advantages: the reference numbers, what was decided here, and the invariants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metagym.rl.advantages import centered, leave_one_out, length_penalty, overlong_penalty, standardized

ALL = (standardized, centered, leave_one_out)
rewards = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=8)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def test_reference_numbers():
    mixed, equal = np.array([1.0, 0, 0, 1]), np.ones(4)
    close(standardized(mixed, mixed), [0.866024, -0.866024, -0.866024, 0.866024])
    close(centered(mixed, mixed), [0.5, -0.5, -0.5, 0.5])
    close(leave_one_out(mixed, mixed), [0.666667, -0.666667, -0.666667, 0.666667])
    uneven = np.array([1, 0.5, 0, -0.25])
    close(standardized(uneven, uneven), [1.240214, 0.338240, -0.563734, -1.014720])
    for advantages in ALL:
        assert np.array_equal(advantages(equal, equal), np.zeros(4))


@pytest.mark.parametrize("advantages", ALL)
def test_equal_outcomes_are_exactly_zero_whatever_the_rewards(advantages):
    noisy = np.full(7, 0.1) * 3  # mean and std are not exact in floats
    assert np.array_equal(advantages(noisy, noisy), np.zeros(7))
    # An all-failed group whose length penalties differ slips through a filter on the shaped reward.
    assert np.array_equal(advantages(np.array([0, -0.7, -0.7, -0.33]), np.zeros(4)), np.zeros(4))


@pytest.mark.parametrize("advantages", ALL)
def test_a_group_of_one_gets_zero(advantages):
    assert np.array_equal(advantages(np.array([1.0]), np.array([1.0])), [0.0])
    assert advantages(np.zeros(0), np.zeros(0)).shape == (0,)


@pytest.mark.parametrize("advantages", ALL)
def test_bad_input_is_refused(advantages):
    with pytest.raises(ValueError, match="finite"):
        advantages(np.array([np.nan, 1.0]), np.array([0.0, 1.0]))
    with pytest.raises(ValueError, match=r"vectors \[N\]"):
        advantages(np.zeros((2, 2)), np.zeros((2, 2)))


@settings(max_examples=30, deadline=None)
@given(values=rewards, shift=st.integers(-4, 4), scale=st.sampled_from([0.5, 2.0, 8.0]), data=st.data())
def test_invariants(values, shift, scale, data):
    r = np.array(values)
    order = np.array(data.draw(st.permutations(range(len(r)))))
    for advantages in ALL:
        a = advantages(r, r)
        assert abs(a.sum()) < 1e-9
        np.testing.assert_allclose(advantages(r + shift, r), a, atol=1e-9)
        np.testing.assert_allclose(advantages(r[order], r[order]), a[order], atol=1e-9)
    np.testing.assert_allclose(standardized(r * scale, r), standardized(r, r), rtol=2e-5, atol=1e-9)


def test_penalties():
    values = [(1, 25, 40), (1, 40, 40), (0, 40, 40), (1, 9, 40), (1, 45, 80)]
    shaped = [r + length_penalty(n, threshold=10, maximum=t) for r, n, t in values]
    assert shaped == [0.5, 0.0, -1.0, 1.0, 0.5]
    overlong = [overlong_penalty(n, maximum=20480, cache=4096) for n in (100, 16384, 18432, 20480, 30000)]
    assert overlong == [0.0, 0.0, -0.5, -1.0, -1.0]
