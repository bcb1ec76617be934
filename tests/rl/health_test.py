"""Rules that stop a run, what they say, and the numbers that say how a step went."""

import math

import numpy as np
import pytest

from metagym.errors import InputError, TrainingError
from metagym.rl.batching import empty_batch
from metagym.rl.health import Rule, Watch, matmul_rate, training_flops
from metagym.rl.metrics import distance, read_jsonl, token_metrics, write_whole


def watch(rule, values, **more):
    """Runs until the rule is broken. -> (step, what is said)"""
    one = Watch([rule])
    for step, value in enumerate(values, start=1):
        try:
            one.check(
                step,
                {} if value is None else {rule.metric: value} | {k: v[step - 1] for k, v in more.items()},
            )
        except TrainingError as error:
            return step, str(error)
    return None


def test_a_rule_is_broken_outside_of_its_bounds():
    rule = Rule("policy/entropy", low=0.5, high=2.0)
    assert watch(rule, [1.0, 0.5, 2.0, 1.5]) is None
    step, said = watch(rule, [1.0, 0.9, 0.4])
    assert step == 3
    assert said == (
        "step 3: policy/entropy is 0.4, outside of [0.5, 2]. "
        "It was 1 at step 1, 0.9 at step 2, 0.4 at step 3."
    )
    assert watch(rule, [1.0, math.nan])[0] == 2
    assert watch(Rule("x", high=1), [-math.inf])[0] == 1


def test_some_rules_are_patient():
    rule = Rule("kl", high=1.0, steps=3)
    assert watch(rule, [2, 2, 0.5, 2, 2, 1, 2]) is None
    assert watch(rule, [0, 2, 2, 2])[0] == 4
    assert watch(rule, [2, None, 2, None, None, 2])[0] == 6  # steps without it do not count


def test_what_else_moved_is_named_and_what_did_not_is_not():
    values = [1.0, 1.1, 0.9, 1.0, 9.0]
    step, said = watch(
        Rule("a", high=5, hint="Look there."),
        values,
        b=[10, 11, 9, 10, 100],
        c=[3, 3.1, 2.9, 3, 3.05],
        d=[0, 0, 0, 0, math.nan],
        **{"time/x": [1, 1, 1, 1, 99]},
    )
    assert step == 5
    assert said.endswith("What else moved most: d 0 -> nan; b 10 -> 100. Look there.")


def test_a_resumed_run_remembers_what_came_before():
    rule = Rule("kl", high=1.0, steps=3)
    resumed = Watch([rule], [{"step": 1, "kl": 2.0}, {"step": 2, "kl": 3.0}])
    with pytest.raises(TrainingError, match="2 at step 1, 3 at step 2, 4 at step 3"):
        resumed.check(3, {"kl": 4.0})


def test_a_rule_without_room_is_refused():
    with pytest.raises(InputError, match="low <= high"):
        Rule("x", low=2, high=1)
    with pytest.raises(InputError, match="at least 1 step"):
        Rule("x", steps=0)


def test_the_matmul_rate_is_that_of_a_machine():
    rate = matmul_rate()
    assert 1e8 < rate < 1e17
    assert training_flops({"a": np.zeros((3, 4)), "b": np.zeros(5)}, 10) == 6 * 17 * 10


def batch(**fields):
    """One row of six trained tokens."""
    import dataclasses

    made = {k: np.array([v]) for k, v in fields.items()}
    return dataclasses.replace(empty_batch(1, 6), mask=np.ones((1, 6), np.float32), **made)


def test_token_metrics_tell_fresh_from_stale_and_calls_apart():
    l = np.array([[-1, -1, -1, -1, -2, -2.0]])
    q = np.array([-1.25, -1, -1, -1.5, -2, -3.0])
    one = batch(
        old_logprobs=l[0],
        behavior_logprobs=q,
        advantages=[1, 1, 1, -1, -1, -1.0],
        turn=[0, 0, 1, 2, 3, 5],
        version=[7, 7, 7, 7, 7, 6],
    )
    clipped = np.array([[1, 0, 0, 0, 1, 1.0]])
    found = token_metrics([(one, l, np.ones((1, 6)), clipped)], version=7)
    assert found["policy/clip_fraction"] == 0.5
    assert found["policy/clip_fraction_up"] == pytest.approx(1 / 6)
    assert found["policy/clip_fraction_down"] == pytest.approx(2 / 6)
    assert found["sampler/max"] == 0.5  # the stale token is 1 off
    assert found["stale/max"] == found["stale/mean"] == 1.0
    assert found["sampler/call_0/max"] == 0.25
    assert found["sampler/call_1/max"] == 0.0
    assert found["sampler/call_2-3/max"] == 0.5
    assert {n.split("/")[-1] for n in found if n.startswith("sampler/call_1/")} == set(distance(l[0], q))
    assert not any("call_4" in name for name in found)
    everything = token_metrics([(one, l, np.ones((1, 6)), clipped)])
    assert everything["sampler/max"] == 1.0
    assert everything["sampler/call_4-7/max"] == 1.0
    assert not any(name.startswith("stale/") for name in everything)


def test_a_reply_that_two_versions_sampled_is_not_fresh():
    """The engine's cache holds what the older weights made of its beginning, trained or not."""
    l, q = np.full((1, 6), -1.0), np.array([-1, -1, -3, -1, -1.5, -1.0])
    one = batch(
        old_logprobs=l[0],
        behavior_logprobs=q,
        advantages=l[0],
        turn=[0, 0, 0, 1, 1, 1],
        version=[6, 6, 7, 7, 7, 7],
    )
    one.mask[0, :2] = 0  # too old to be trained
    found = token_metrics([(one, l, l, l * 0)], version=7)
    assert found["stale/max"] == 2.0
    assert found["sampler/max"] == 0.5


def test_calls_of_one_turn_are_not_told_twice():
    l = np.full((1, 6), -1.0)
    one = batch(old_logprobs=l[0], behavior_logprobs=l[0], advantages=l[0], turn=[0] * 6, version=[0] * 6)
    found = token_metrics([(one, l, l, l * 0)], version=0)
    assert not any("call" in name for name in found)
    assert found["sampler/max"] == 0.0


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_whole(path, "old\n")

    def full(handle):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "new and longer\n")
    assert path.read_text() == "old\n"
    monkeypatch.undo()
    write_whole(path, '{"step": 1}\n')
    assert read_jsonl(path) == [{"step": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
