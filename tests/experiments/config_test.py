"""Configs: what the command line can set, and what every kind of wrong input is answered with."""

import argparse
import json
import re

import pytest
from ml_collections import ConfigDict

from metagym.errors import InputError, UnknownNameError
from metagym.experiments import config as config_lib


def parse(*arguments, file="debug"):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--workdir")
    return config_lib.parse([f"--config={file}", *arguments], parser)[1]


@pytest.fixture
def write(tmp_path):
    """Writes a config file whose get_config() ends with the given lines."""

    def writer(*lines, head="from metagym.experiments.config import base, evaluation"):
        body = "".join(f"    {line}\n" for line in ("config = base()", *lines, "return config"))
        path = tmp_path / "a_config.py"
        path.write_text(f"{head}\ndef get_config():\n{body}")
        return str(path)

    return writer


@pytest.mark.parametrize("name", config_lib.available())
def test_every_config_that_comes_along_is_valid(name):
    config = config_lib.load(name)
    config_lib.check(config)
    json.dumps(config_lib.public(config))
    text = (config_lib.CONFIGS / f"{name}.py").read_text()
    assert all(word in text for word in ("Time:", "Expected", f"CONFIG=experiments/configs/{name}.py"))


def test_fields_are_set_with_the_type_they_have():
    config = parse(
        "--config.steps=7",
        "--config.optimizer.learning_rate=1e-4",
        "--config.world.types=('levers-left','food-apple')",
        "--config.agent.history=false",
        "--config.evaluate.toy.episodes",
        "5",
        "--config.world.kwargs={'rounds': 2}",
    )
    assert config.steps == 7
    assert config.optimizer.learning_rate == 1e-4
    assert config.world.types == ("levers-left", "food-apple")
    assert config.agent.history is False
    assert config.evaluate.toy.episodes == 5
    assert config.world.kwargs.to_dict() == {"rounds": 2}


def test_flagfile_holds_overrides(tmp_path):
    (tmp_path / "flags").write_text("--config.steps=9\n# a comment\n--config.agent.prefix=x y\n")
    config = parse(f"--flagfile={tmp_path / 'flags'}", "--config.seed=3")
    assert (config.steps, config.agent.prefix, config.seed) == (9, "x y", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.stepz=7"], r"unknown config field 'stepz'. Did you mean 'steps'"),
        (["--config.optimizer.lr=1"], r"unknown config field 'optimizer.lr'"),
        (["--config.optimizer.learning_rat=1"], r"Did you mean 'optimizer.learning_rate'"),
        (["--config.world.kwargs.rounds=1"], r"set it whole, --config.world.kwargs="),
        (["--noconfig.agent.historie"], r"Did you mean 'agent.history'"),
        (["--config.steps=many"], r"--config.steps=many: invalid literal for int"),
        (["--config.steps=2.5"], r"--config.steps=2.5"),
        (["--config.steps"], r"Missing value for flag --config.steps"),
        (["--config.agent.history=maybe"], r"--config.agent.history=maybe: .*boolean"),
        (["--config.optimizer=3"], r"--config.optimizer=3"),
        (["--config.world.types=({'a': 1}, {'a': 2})"], r"'world.types' is a list of dicts: .* sweep"),
        (["--config.group_size=0"], r"'group_size' must be positive, got 0"),
        (["--config.max_distance=nan"], r"'max_distance' must be positive, got nan"),
        (["--config.seed=-1"], r"'seed' must not be negative, got -1"),
        (["--config.retries=-1"], r"'retries' must not be negative, got -1"),
        (["--config.evaluate.toy.episodes=0"], r"'evaluate.toy.episodes' must be positive, got 0"),
        (["--config.evaluate={'x': {'episodes': 3}}"], r"'evaluate.x' must be made by evaluation"),
        (["--wrkdir=x"], r"unknown option '--wrkdir'. Did you mean '--workdir'"),
        (["--flagfile=/nowhere"], r"nowhere"),
        (["stray"], r"unexpected argument 'stray'"),
    ],
)
def test_wrong_arguments_are_explained(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["config.stepz = 3"], r"line 4: AttributeError: .*'steps'"),
        (["config.agent.prefiks = 'x'"], r"line 4: AttributeError: .*'prefix'"),
        (["config.steps = 'three'"], r"line 4: TypeError"),
        (["config.sweep = ({'a': 1}, {'a': 2})"], r"line 4: AttributeError"),
        (["config.seed = 1 +"], r"line 4: SyntaxError"),
        (["raise ValueError('boom')"], r"line 4: ValueError: boom"),
        (["config = None"], r"must return a ConfigDict, got NoneType"),
    ],
)
def test_wrong_files_are_explained_with_the_line(write, lines, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(file=write(*lines))
    assert "\n" not in str(caught.value)


def test_a_config_of_other_fields_is_refused(write):
    head = "from metagym.experiments.config import base\nfrom ml_collections import ConfigDict"
    with pytest.raises(UnknownNameError, match="unknown config field 'a'"):
        parse(file=write("config = ConfigDict({'a': 1})", head=head))
    with pytest.raises(InputError, match="the config has no field"):
        parse(file=write("config = ConfigDict({'seed': 1})", head=head))


def test_unknown_files_and_files_without_config_are_explained(tmp_path):
    with pytest.raises(UnknownNameError, match=r"unknown config file 'debugg'. Did you mean 'debug'"):
        parse(file="debugg")
    with pytest.raises(UnknownNameError, match=r"Did you mean 'experiments/configs/debug.py'"):
        parse(file="experiments/configs/debugg.py")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(InputError, match="has no function get_config"):
        parse(file=str(tmp_path / "empty.py"))
    (tmp_path / "imports.py").write_text("import no_such_module\n")
    with pytest.raises(InputError, match="line 1: ModuleNotFoundError"):
        parse(file=str(tmp_path / "imports.py"))
    with pytest.raises(InputError, match="no config given"):
        parse(file="")


def test_secrets_are_not_recorded(tmp_path):
    config = config_lib.load("debug")
    config.world.kwargs = ConfigDict(
        {"api_key": "k1", "nested": {"hub_token": "k2", "n": 1}, "password": None}
    )
    config_lib.write(config, tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert not re.search("k1|k2", text)
    recorded = json.loads(text)
    assert recorded["world"]["kwargs"] == {
        "api_key": config_lib.HIDDEN,
        "nested": {"hub_token": config_lib.HIDDEN, "n": 1},
        "password": None,
    }
    assert recorded["sampling"]["max_tokens"] == 4  # not taken for a secret


def test_a_begun_config_is_not_changed_by_overrides_of_another():
    assert parse("--config.steps=9").steps == 9
    assert parse().steps == 2


def test_stop_rules_are_made_by_rule(tmp_path):
    config = config_lib.load("debug")
    config.stop_rules.collapse = config_lib.rule("policy/entropy", low=0.01, steps=3)
    config_lib.check(config)
    config_lib.write(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["stop_rules"]["collapse"]["high"] == float(
        "inf"
    )
    config.stop_rules.other = ConfigDict({"metric": "x", "hihg": 1.0})
    with pytest.raises(InputError, match=r"'stop_rules.other' must be made by rule\(...\)"):
        config_lib.check(config)
    with pytest.raises(InputError, match=r"'rollout.staleness' must not be negative, got -1"):
        parse("--config.rollout.staleness=-1")
