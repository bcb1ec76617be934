"""Scores, the table, results.json and the picture."""

import math

import pytest

from metagym.experiments import results
from metagym.experiments.results import Score


def test_score_counts_outcomes_and_leaves_failures_out():
    score = Score.of([[1.0], [0.0], [1.0], [0.4]], [2, 4, 2, 4], failed=3)
    assert (score.low, score.high) == pytest.approx(results.wilson(2, 4))
    assert score.pass_at == {}
    assert (score.successes, score.episodes, score.failed, score.turns, score.rate) == (2, 4, 3, 3.0, 0.5)
    assert math.isnan(Score.of([], []).rate)


def test_pass_at_k_by_hand():
    """Of 4 attempts 1 succeeded: 2 of them hold it in 3 of 6 ways."""
    assert results.pass_at_k(4, 1, 2) == pytest.approx(0.5)
    assert [results.pass_at_k(3, c, 1) for c in range(4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert (results.pass_at_k(5, 0, 5), results.pass_at_k(5, 3, 3)) == (0.0, 1.0)
    with pytest.raises(ValueError, match="Pass@3 needs at least 3 attempts, there are 2"):
        results.pass_at_k(2, 1, 3)
    # Unbiased: over every way that attempts come out, its mean is the chance itself.
    p, n, k = 0.3, 5, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * results.pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k)


def test_attempts_at_a_task_are_no_independent_trials():
    """Ten tasks, solved always or never: four attempts tell no more than one."""
    always = Score.of([[1.0] * 4] * 3 + [[0.0] * 4] * 7, [1] * 40)
    assert (always.low, always.high) == pytest.approx(results.wilson(3, 10))
    for k in ("2", "4"):
        assert always.pass_at[k] == pytest.approx((0.3, *results.wilson(3, 10)))
    # Every task as hard as every other: then they are.
    even = Score.of([[1.0, 0.0]] * 10, [1] * 20)
    assert even.rate == 0.5
    assert even.pass_at["2"] == pytest.approx((1.0, *results.wilson(10, 10)))
    assert even.metrics("x")["x/pass@2"] == 1.0
    # One task has an attempt less: it is left out of Pass@3 alone.
    less = Score.of([[1.0, 0.0], [0.0, 0.0, 0.0]], [1] * 5, failed=1)
    assert (less.episodes, list(less.pass_at), less.pass_at["3"][0]) == (5, ["2", "3"], 0.0)
    assert "held out, Pass@2" in results.table({0: {"held out": even}})


def curve():
    low, high = Score.of([[0.0]] * 9 + [[1.0]], [8] * 10), Score.of([[1.0]] * 10, [3] * 10)
    return {0: {"small": low, "large": low}, 4: {"small": high}, 10: {"small": high, "large": low}}


def test_table_tells_whether_the_intervals_are_apart():
    lines = results.table(curve()).splitlines()
    assert lines[0].split("  ")[0] == "success at temperature 1"
    assert "before (step 0)" in lines[0]
    assert "after (step 10)" in lines[0]
    assert lines[2].split() == [
        "small",
        "10",
        "10.0",
        "%",
        "[1.8,",
        "40.4]",
        "100.0",
        "%",
        "[72.2,",
        "100.0]",
        "yes",
    ]
    assert lines[3].split()[-1] == "no"
    assert "before" not in results.table({0: curve()[0]})
    assert results.table({}) == "nothing was evaluated"
    failed = {0: {"small": Score.of([[1.0]], [1], failed=2)}}
    assert results.table(failed).endswith("2 episodes do not count: something outside the agent failed.")


def test_results_survive_a_round_trip(tmp_path):
    path = tmp_path / "results.json"
    assert results.read(path) == {}
    told = {**curve(), 11: {"small": Score.of([[1.0, 0.0], [0.0, 0.0]], [1] * 4)}}
    results.write(told, path, seconds=3.5)
    assert results.read(path) == told
    assert '"rate": 1.0' in path.read_text()
    assert '"seconds": 3.5' in path.read_text()


def test_the_picture_is_a_png(tmp_path):
    results.plot(curve(), {1: 0.1, 2: 0.5, 3: 0.9}, tmp_path / "curve.png", "a title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    results.plot({}, {}, tmp_path / "empty.png", "nothing yet")
    assert (tmp_path / "empty.png").is_file()
