"""From a config to the parts of a run: algorithms with all their terms, penalties."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from metagym.errors import InputError
from metagym.experiments import build
from metagym.experiments import config as config_lib
from metagym.rl import advantages, losses, shaping
from metagym.rl.types import LossInputs
from metagym.types import StopReason, Task, Trajectory, Turn

NAMES = ["cispo", "dapo", "dr_grpo", "grpo", "gspo", "reinforce_pp", "rft", "rloo"]


def algorithm(name, **args):
    config = config_lib.base()
    config.algorithm.name = name
    config.algorithm.args = {**({"max_tokens": 64} if name == "dr_grpo" else {}), **args}
    config_lib.check(config)
    return build.build_algorithm(config)


def test_what_there_is():
    assert sorted(build.ALGORITHMS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_takes_every_term(name):
    made = algorithm(
        name,
        reduction="constant",
        constant=7,
        credit="turn",
        whiten=True,
        correction={"tis": {"cap": 4.0}, "sequence_mask": {"low": 0.9}},
        kl="k2",
        kl_coef=0.01,
        kl_in="reward",
        entropy_coef=0.02,
        drop_equal=True,
        select="complete",
    )
    assert (made.name, made.reduction, made.constant, made.whiten) == (name, "constant", 7, True)
    assert (made.kl, made.kl_coef, made.kl_in) == (losses.k2, 0.01, "reward")
    assert (made.entropy_coef, made.drop_equal) == (0.02, True)
    assert (made.credit, made.select) == (advantages.by_turn, shaping.complete)
    assert algorithm(name).kl is None  # no coefficient, no reference model
    one = jnp.ones((1, 1))
    x = LossInputs(one, 0 * one, -2 * one, one, one > 0, jnp.ones((1, 1), jnp.int32))
    assert made.correction is not None
    assert float(made.correction(x)[0, 0]) == 0  # exp(2) is above 4, and out of the mask's [0.9, 2]
    near = x._replace(behavior=-0.5 * one)
    np.testing.assert_allclose(made.correction(near), np.exp(0.5), rtol=1e-6)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("cispo", "rft")])
def test_every_clip_can_be_dual(name):
    loss = algorithm(name, dual=3.0).policy_loss
    assert isinstance(loss, partial)
    assert loss.keywords["dual"] == 3.0


@pytest.mark.parametrize(
    ("given", "function", "keywords"),
    [
        ("tis", losses.truncated_importance, {}),
        ({"tis": {"cap": 4.0}}, losses.truncated_importance, {"cap": 4.0}),
        ({"icepop": {"low": 0.8, "high": 1.25}}, losses.icepop, {"low": 0.8, "high": 1.25}),
        ({"sequence_tis": {"cap": 3.0}}, losses.sequence_importance, {"cap": 3.0}),
        ({"off_policy_mask": {"bound": 0.1}}, losses.off_policy_mask, {"bound": 0.1}),
    ],
)
def test_bounds_of_corrections_are_set_by_name(given, function, keywords):
    found = algorithm("grpo", correction=given).correction
    assert (getattr(found, "func", found), getattr(found, "keywords", {})) == (function, keywords)


def test_arguments_of_credit_and_selection_are_set_by_name():
    made = algorithm("rloo", credit={"step": {"discount": 0.9, "weight": 0.5}}, kl_coef=0.1)
    assert made.credit.keywords == {"discount": 0.9, "weight": 0.5}
    assert made.kl is losses.k3
    assert algorithm("grpo", select={"successes": {"above": 0.9}}).select.keywords == {"above": 0.9}
    assert algorithm("rft", above=0.25).select.keywords == {"above": 0.25, "mask_format_errors": True}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("grpo", {"correction": "tiz"}, "unknown correction 'tiz'. Did you mean 'tis'"),
        ("grpo", {"correction": {"tis": {"kap": 3}}}, "unknown argument of correction tis 'kap'. .* 'cap'"),
        ("grpo", {"correction": "off_policy_mask"}, "correction off_policy_mask needs 'bound'"),
        ("grpo", {"kl": "k4"}, "unknown kl 'k4'"),
        ("grpo", {"kl": {"k1": {}, "k2": {}}}, "args.kl takes one name, got 2"),
        ("grpo", {"kl_in": "los"}, "unknown kl_in 'los'. Did you mean 'loss'"),
        ("grpo", {"reduction": "token-men"}, "unknown reduction 'token-men'. Did you mean 'token-mean'"),
        ("grpo", {"credit": "tern"}, "unknown credit 'tern'. Did you mean 'turn'"),
        ("rft", {"kl_koef": 1}, "unknown argument of algorithm rft 'kl_koef'. Did you mean 'kl_coef'"),
        ("_algorithm", {}, "unknown algorithm '_algorithm'"),
    ],
)
def test_wrong_terms_are_explained(name, args, message):
    with pytest.raises(InputError, match=message):
        algorithm(name, **args)


def test_penalties_are_added_to_the_reward_alone():
    config = config_lib.base()
    config.penalties = {
        "length": {"threshold": 2, "maximum": 6},
        "format": {"cost": 0.05},
        "overlong": {"maximum": 20, "cache": 10},
    }
    config_lib.check(config)
    turns = tuple(Turn("", "", action, 0.0) for action in ("go", None, "go", "go"))
    task = Task("a", "a", "train")
    played = Trajectory(task, 0, turns, (), 1.0, 1.0, StopReason.TERMINATED)
    found = shaping.shaped(played, build.build_penalties(config))
    assert (found.reward, found.outcome) == (pytest.approx(1 - 0.5 - 0.05), 1.0)
    assert dataclasses.replace(found, reward=1.0) == played
    config.penalties = {"lenght": {}}
    with pytest.raises(InputError, match=r"unknown penalty 'lenght'. Did you mean 'length'"):
        build.build_penalties(config)
    config.penalties = {"length": {"threshold": 2}}
    with pytest.raises(InputError, match="penalty length needs 'maximum'"):
        build.build_penalties(config)
