"""Scores, the table, results.json and the picture."""

import math

from metagym.experiments import results
from metagym.experiments.results import Score


def test_score_counts_outcomes_and_leaves_failures_out():
    score = Score.of([1.0, 0.0, 1.0, 0.4], [2, 4, 2, 4], failed=3)
    assert (score.successes, score.episodes, score.failed, score.turns, score.rate) == (2, 4, 3, 3.0, 0.5)
    assert math.isnan(Score.of([], []).rate)


def curve():
    low, high = Score.of([0.0] * 9 + [1.0], [8] * 10), Score.of([1.0] * 10, [3] * 10)
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
    failed = {0: {"small": Score.of([1.0], [1], failed=2)}}
    assert results.table(failed).endswith("2 episodes do not count: something outside the agent failed.")


def test_results_survive_a_round_trip(tmp_path):
    path = tmp_path / "results.json"
    assert results.read(path) == {}
    results.write(curve(), path, seconds=3.5)
    assert results.read(path) == curve()
    assert '"rate": 1.0' in path.read_text()
    assert '"seconds": 3.5' in path.read_text()


def test_the_picture_is_a_png(tmp_path):
    results.plot(curve(), {1: 0.1, 2: 0.5, 3: 0.9}, tmp_path / "curve.png", "a title")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    results.plot({}, {}, tmp_path / "empty.png", "nothing yet")
    assert (tmp_path / "empty.png").is_file()
