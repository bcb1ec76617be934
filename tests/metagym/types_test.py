import dataclasses

import numpy as np
import pytest

from metagym.errors import (
    AgentError,
    InfraError,
    InputError,
    MetaGymError,
    MissingExtraError,
    UnknownNameError,
)
from metagym.types import Generation, Group, Sampling, StopReason, Task, TokenTrace, Trajectory

TASK = Task("a:1", "a", "train")


def generation(**changes) -> Generation:
    fields = {
        "tokens": np.array([4, 5, 2], np.int32),
        "logprobs": np.array([-1.0, -0.5, 0.0], np.float32),
        "version": np.zeros(3, np.int32),
        "finish": "stop",
    }
    return Generation(**(fields | changes))


def trace(**changes) -> TokenTrace:
    nan = np.nan
    fields = {
        "tokens": np.arange(4, dtype=np.int32),
        "sampled": np.array([False, False, True, True]),
        "trainable": np.array([False, False, True, False]),
        "logprobs": np.array([nan, nan, -1.0, -2.0], np.float32),
        "version": np.array([-1, -1, 0, 0], np.int32),
        "turn": np.zeros(4, np.int32),
    }
    return TokenTrace(**(fields | changes))


def trajectory(task: Task = TASK, seed: int = 0) -> Trajectory:
    return Trajectory(task, seed, (), (), 0.0, 0.0, StopReason.TERMINATED)


def test_a_generation_without_routing_has_no_columns_of_it():
    assert generation().routing.shape == (3, 0)
    assert trace().routing.shape == (4, 0)
    assert len(trace()) == 4


@pytest.mark.parametrize("bad", [np.nan, -np.inf, 0.1])
def test_a_generation_with_a_log_prob_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="of token 1 is not a log-probability"):
        generation(logprobs=np.array([-1.0, bad, -1.0], np.float32))


@pytest.mark.parametrize("field", ["tokens", "logprobs", "version"])
def test_lengths_must_agree(field):
    with pytest.raises(ValueError, match="lengths differ"):
        generation(**{field: getattr(generation(), field)[:-1]})
    with pytest.raises(ValueError, match="lengths differ"):
        trace(**{field: getattr(trace(), field)[:-1]})


def test_a_made_up_log_prob_of_zero_can_not_pass_for_a_sampled_one():
    with pytest.raises(ValueError, match="finite exactly where tokens were sampled"):
        trace(logprobs=np.array([np.nan, 0.0, -1.0, -2.0], np.float32))
    with pytest.raises(ValueError, match="finite exactly where tokens were sampled"):
        trace(logprobs=np.full(4, np.nan, np.float32))
    with pytest.raises(ValueError, match="trainable that was not sampled"):
        trace(trainable=np.array([True, False, True, False]))


def test_a_group_shares_task_and_seed():
    Group([trajectory(), trajectory()])
    for other in (trajectory(seed=1), trajectory(task=Task("a:2", "a", "train"))):
        with pytest.raises(ValueError, match="differ in task or seed"):
            Group([trajectory(), other])


def test_what_is_in_the_loss():
    assert {s for s in StopReason if not s.in_loss} == {StopReason.INFRA, StopReason.INVALID_REWARD}


def test_the_sampling_contract():
    assert Sampling().on_contract
    for change in ({"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        assert not dataclasses.replace(Sampling(), **change).on_contract


def test_an_unknown_name_shows_near_matches_and_what_exists():
    error = UnknownNameError("color", "bleu", ["red", "blue"], "Pick one.")
    assert str(error) == "unknown color 'bleu'. Did you mean 'blue'? Known: blue, red. Pick one."
    assert isinstance(error, InputError | KeyError)
    assert "... (20 in all)" in str(UnknownNameError("x", "q", range(20)))
    assert "Known: none." in str(UnknownNameError("x", "q", []))


def test_the_tree_of_errors():
    assert issubclass(InputError, ValueError)
    assert issubclass(InfraError, RuntimeError)
    assert issubclass(MissingExtraError, ImportError)
    assert not issubclass(AgentError, InfraError)
    assert all(issubclass(e, MetaGymError) for e in (InputError, InfraError, AgentError, MissingExtraError))
    assert "pip install 'metagym-rl[minihack]'" in str(MissingExtraError("MiniHack", "minihack"))
