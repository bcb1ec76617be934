"""Games that others wrote, as text envs: Colossal Cave, TextWorld's own, and what a game may return."""

import contextlib
import functools
import importlib.util
import inspect
import re
import warnings

import pytest

from metagym import adapter, testing
from metagym.adapter import GameEnv
from metagym.text_env import ListedTasks, NumberedTasks
from metagym.types import Task

WORLD = NumberedTasks(["cave"], {"train": range(100), "test": range(100, 200)})


class Cave:
    """The package `adventure` (Colossal Cave, 1977) with reset() and step()."""

    def __init__(self, task, seed):
        self.seed = int(task.id.rpartition(":")[2])

    def reset(self):
        from adventure import game, load_advent_dat

        self.game = game.Game(self.seed)
        load_advent_dat(self.game)
        self.game.start()
        return self.game.output + self.game.do_command(["no"])  # no instructions

    def step(self, text):
        words = re.findall(r"[a-z0-9]+", text.lower())[:2]
        if not words or words[0] in ("save", "suspend", "pause"):
            return "I don't understand that!", self.score(), False
        return self.game.do_command(words), self.score(), bool(self.game.is_finished)

    def score(self):
        return float(self.game.compute_score()[0])


def cave(**kwargs):
    return GameEnv(Cave, WORLD, score=True, **kwargs)


def test_a_foreign_game_keeps_the_rules():
    testing.check_text_env(cave, tasks_differ=False)


def test_colossal_cave_is_played():
    with contextlib.closing(cave(max_turns=20)) as env:
        first, info = env.reset(seed=0, options={"task": "cave:7"})
        assert "YOU ARE STANDING AT THE END OF A ROAD" in first
        assert info == {"task": "cave:7", "seed": 0, "success": False}
        assert "INSIDE A BUILDING" in env.step("enter building")[0]
        assert "OK" in env.step("take lamp")[0]
        assert "BRASS LANTERN" in env.step("inventory")[0].upper()
        assert env.step("look")[1] == 0.0  # the score does not change, so there is no reward


def test_the_adapter_is_short():
    assert len(inspect.getsource(adapter).splitlines()) < 60


class Returns:
    """A game that returns what it is given."""

    closed = 0

    def __init__(self, first, then):
        self.first, self.then = first, then

    def __call__(self, task, seed):
        return self

    def reset(self):
        return self.first

    def step(self, text):
        return self.then

    def close(self):
        Returns.closed += 1


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        ("text", (0.0, False, False, False)),
        (("text", 2, True), (2.0, True, False, False)),
        (("text", 2, True, {"won": True}), (2.0, True, False, True)),
        (("text", 2, False, True, {"success": 1}), (2.0, False, True, True)),
    ],
)
def test_what_a_game_may_return(then, expected):
    env = GameEnv(Returns(("first", {"admissible_commands": ("go",)}), then), WORLD, max_chars=3)
    first, info = env.reset(seed=0)
    assert (first, info["admissible"]) == ("fir", ["go"])
    text, reward, terminated, truncated, info = env.step("x")
    assert (text, reward, terminated, truncated, info["success"]) == ("tex", *expected)


def test_games_are_closed():
    Returns.closed = 0
    env = GameEnv(Returns("first", "then"), WORLD)
    env.reset(seed=0)
    env.reset(seed=0)
    env.close()
    env.close()
    assert Returns.closed == 2


def test_scores_become_rewards():
    game = Returns("first", ("text", 5, False))
    env = GameEnv(game, WORLD, score=True)
    env.reset(seed=0)
    assert env.step("x")[1] == 5
    game.then = ("text", 3, False)
    assert env.step("x")[1] == -2
    env.reset(seed=0)
    assert env.step("x")[1] == 3


# --- TextWorld's own games, where it is installed --------------------------------------------------------

real = pytest.mark.skipif(not importlib.util.find_spec("textworld"), reason="textworld is not installed")


class TextWorldGame:
    """A game file of TextWorld. Its interpreter, written in C, hangs with a line of 10,000 characters."""

    def __init__(self, task, seed, *, folder):
        import textworld.gym

        infos = textworld.EnvInfos(admissible_commands=True, won=True)
        id = textworld.gym.register_games([f"{folder}/{task.id}.z8"], infos, max_episode_steps=50)
        self.env = textworld.gym.make(id)
        self.close = self.env.close

    def reset(self):
        with warnings.catch_warnings(action="ignore"):  # that games of TextWorld are none of Infocom's
            return self.env.reset()

    def step(self, text):
        return self.env.step("".join(c for c in text[:200] if c.isascii() and c.isprintable()))


@real
def test_textworlds_games_keep_the_rules(tmp_path):
    import textworld  # pyright: ignore[reportMissingImports]

    tasks = []
    for number in range(2):
        options = textworld.GameOptions()
        options.seeds, options.nb_rooms, options.nb_objects = 1234 + number, 3, 4
        options.path = str(tmp_path / f"game-{number}.z8")
        _, game = textworld.make(options)
        tasks.append(Task(f"game-{number}", "custom", "train"))
    walkthrough = game.metadata["walkthrough"]
    make = functools.partial(TextWorldGame, folder=str(tmp_path))
    testing.check_text_env(lambda: GameEnv(make, ListedTasks(tasks), score=True), vector=False, steps=8)
    with contextlib.closing(GameEnv(make, ListedTasks(tasks), score=True)) as env:
        _, info = env.reset(seed=0, options={"task": "game-1"})
        assert "look" in info["admissible"]
        for command in walkthrough:
            _, reward, terminated, _, info = env.step(command)
        assert (reward, terminated, info["success"]) == (1.0, True, True)
