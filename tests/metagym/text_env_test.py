import copy
import subprocess
import sys
from collections.abc import Mapping, Sequence

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from hypothesis import example, given
from hypothesis import strategies as st

from metagym.errors import InputError, UnknownNameError
from metagym.text_env import ListedTasks, NumberedTasks, TextEnv, episode_rng
from metagym.types import Task

SPLITS = {
    "train": range(0, 10**9),
    "validation": range(10**9, 10**9 + 7),
    "test": range(2 * 10**9, 3 * 10**9),
}


class EchoEnv(TextEnv):
    """Says which task it plays and a random number, then repeats what it is told. Ends on "end"."""

    def __init__(self, **kwargs):
        super().__init__(NumberedTasks(["a", "b", "c"], SPLITS), **kwargs)

    def _begin(self, task: Task, seed: int, rng: np.random.Generator, options: Mapping):
        return f"{task.id} {rng.integers(10**9)}", {}

    def _act(self, action: str):
        return action, 1.0, action == "end", False, {"success": action == "end"}


def test_numbered_tasks_are_listed_without_being_held():
    tasks = NumberedTasks(["a", "b", "c"], SPLITS)
    assert isinstance(tasks, Sequence)
    assert len(tasks) == 3 * (2 * 10**9 + 7)
    assert [t.id for t in tasks[:4]] == ["a:0", "b:0", "c:0", "a:1"]
    assert tasks[3 * 10**9] == Task(f"a:{10**9}", "a", "validation")
    assert tasks[-1] == Task(f"c:{3 * 10**9 - 1}", "c", "test")
    assert len(tasks[1::2][:-1]) == len(range(len(tasks))[1::2][:-1])
    assert Task("b:5", "b", "train") in tasks
    assert Task("b:5", "b", "test") not in tasks
    with pytest.raises(IndexError):
        tasks[len(tasks)]


@pytest.mark.parametrize(
    ("types", "splits", "message"),
    [
        ("aba", SPLITS, "a type occurs twice"),
        ("ab", {"train": range(10), "test": range(9, 20)}, "splits 'train' and 'test' share numbers"),
        ("ab", {"train": range(-1, 10)}, "split 'train' has negative numbers"),
    ],
)
def test_numbers_that_would_be_of_two_splits_are_refused(types, splits, message):
    with pytest.raises(InputError, match=message):
        NumberedTasks(types, splits)
    assert len(NumberedTasks("ab", {"even": range(0, 9, 2), "odd": range(1, 9, 2), "none": range(0)})) == 18


@given(st.integers(0, 3 * (2 * 10**9 + 7) - 1))
def test_every_numbered_task_is_found_by_its_id(index):
    tasks = NumberedTasks(["a", "b:x", "c"], SPLITS)
    assert tasks.find(tasks[index].id) == tasks[index]


@given(st.text() | st.from_regex(r"[abc]:[0-9٣²]{1,25}", fullmatch=True))
@example("c:²")
@example("a:07")
@example("c:" + 5000 * "9")
def test_a_malformed_id_is_unknown(id):
    tasks = NumberedTasks(["a", "b"], {"train": range(10)})
    if id not in {t.id for t in tasks}:
        with pytest.raises(UnknownNameError):
            tasks.find(id)


def test_listed_tasks():
    listed = [Task("x", "one", "train"), Task("y", "two", "train"), Task("z", "two", "test")]
    tasks = ListedTasks(listed)
    assert (tasks.types, tasks.splits, list(tasks)) == (("one", "two"), ("train", "test"), listed)
    assert list(tasks.select("train", {"two"})) == [listed[1]]
    assert list(tasks.select(None, {"two"})) == listed[1:]
    with pytest.raises(UnknownNameError, match="unknown task 'w'"):
        tasks.find("w")
    with pytest.raises(InputError, match="'x' is listed twice"):
        ListedTasks([*listed, listed[0]])


def test_split_types_and_tasks_select():
    assert len(EchoEnv().tasks) == 3 * 10**9
    assert len(EchoEnv(split="validation", types=("a", "c")).tasks) == 14
    assert len(EchoEnv(split=None).tasks) == len(NumberedTasks("abc", SPLITS))
    assert [t.id for t in EchoEnv(tasks=["b:7", "a:1"]).tasks] == ["b:7", "a:1"]
    assert {EchoEnv(split="validation", types="b").reset(seed=s)[1]["task"][0] for s in range(9)} == {"b"}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "tset"}, "unknown split 'tset'. Did you mean 'test'"),
        ({"types": ["a", "d"]}, "unknown type 'd'. Known: a, b, c"),
        ({"types": []}, "no type selected"),
        ({"tasks": ["d:1"]}, "unknown task 'd:1'"),
        ({"tasks": []}, "no task"),
        ({"render_mode": "human"}, "unknown render mode"),
        ({"max_turns": 0}, "max_turns"),
        ({"max_turns": "9"}, "max_turns must be an int"),
        ({"max_turns": float("nan")}, "max_turns must be an int"),
        ({"max_turns": 2.5}, "max_turns must be an int"),
        ({"max_turns": True}, "max_turns must be an int"),
        ({"types": 5}, "types= takes a str or several, got int: 5"),
        ({"types": ["a", 5]}, "types= takes a str or several, got int: 5"),
        ({"tasks": 5}, "tasks= takes a str or several, got int: 5"),
        ({"split": 5}, "split= takes one name, or None for all, got 5"),
        ({"split": ["train"]}, "split= takes one name, or None for all, got"),
    ],
)
def test_unknown_names_are_refused_with_what_there_is(kwargs, message):
    with pytest.raises(InputError, match=message):
        EchoEnv(**kwargs)


def test_a_task_outside_of_the_selection_is_told_apart_from_an_unknown_one():
    env = EchoEnv(split="train", types="a", tasks=["a:1", "a:2"])
    for id, message in [
        ("a:1000000000", "is in split 'validation', but this env was made with split='train'"),
        ("b:1", r"is of type 'b', but this env was made with types=\['a'\]"),
        ("a:3", "not one of the 2"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            env.reset(options={"task": id})
        assert not isinstance(caught.value, UnknownNameError)
    with pytest.raises(UnknownNameError, match="An id is"):
        env.task("a:-1")
    for wrong in (5, ["a:1"], Task("a:1", "a", "train")):
        with pytest.raises(InputError, match="by its id, a str; got"):
            env.reset(options={"task": wrong})
    with pytest.raises(UnknownNameError, match=r"reset option 'taks'. Did you mean 'task'"):
        env.reset(options={"taks": "a:1"})


def test_task_and_seed_determine_the_episode():
    one, other = EchoEnv(), EchoEnv()
    first, info = one.reset(seed=5)
    assert one.reset(seed=5)[0] == first
    for _ in range(3):
        drawn, info = one.reset()
        assert other.reset(seed=info["seed"], options={"task": info["task"]})[0] == drawn
    assert one.reset(seed=1, options={"task": "a:1"})[0] != one.reset(seed=2, options={"task": "a:1"})[0]
    assert episode_rng(Task("a:1", "a", "train"), 3).integers(10**6) == 179947  # pinned: tasks stay the same


def test_a_refused_reset_changes_nothing():
    one, other = EchoEnv(), EchoEnv()
    one.reset(seed=5)
    other.reset(seed=5)
    for options in ({"task": "nonsense"}, {"task": "x" * 10**6}, ["task"]):
        with pytest.raises(InputError) as refused:
            one.reset(options=options)  # type: ignore[arg-type]
        assert len(str(refused.value)) < 2000
    assert one.step("x")[0] == "x"
    assert one.reset()[0] == other.reset()[0]


def test_the_unseeded_reset_after_a_seeded_one_is_the_same_in_two_processes():
    """An env was deterministic after reset(seed) but no longer after the next reset()."""
    code = (
        "import gymnasium as gym; e = gym.make('metagym:metagym/Toy-v0'); e.reset(seed=7);"
        "print(*[(o, i['task'], i['seed']) for o, i in [e.reset(), e.reset()]])"
    )
    run = [sys.executable, "-W", "error", "-c", code]
    outputs = [subprocess.run(run, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    assert "task" not in outputs[0]
    assert len(outputs[0]) > 100


def test_the_order_of_calls_and_the_kind_of_action_are_checked():
    env = EchoEnv()
    with pytest.raises(ResetNeeded, match="before step"):
        env.step("x")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="an action is a str, got int"):
        env.step(3)  # type: ignore[arg-type]
    assert env.step("end")[2]
    with pytest.raises(ResetNeeded, match="episode is over"):
        env.step("x")


def test_a_closed_env_takes_no_step_but_a_reset():
    env = EchoEnv()
    env.reset(seed=0)
    env.close()
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset(seed=0)
    assert env.step("x")[0] == "x"


def test_an_episode_is_repeated_not_copied():
    env = EchoEnv()
    observation, info = env.reset(seed=3)
    stream = [env.step(action) for action in ("one", "two")]
    with pytest.raises(TypeError, match="a EchoEnv can't be copied"):
        copy.deepcopy(env)
    again = EchoEnv()
    assert again.reset(seed=info["seed"], options={"task": info["task"]})[0] == observation
    assert [again.step(action) for action in ("one", "two")] == stream


def test_the_turn_limit_truncates_and_starts_anew_with_each_reset():
    env = EchoEnv(max_turns=3)
    for _ in range(2):
        env.reset(seed=0)
        assert [env.step("x")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
        env.reset(seed=0)
        env.step("x")  # broken off
    env.reset(seed=0)
    env.step("x")
    env.step("x")
    assert env.step("end")[2:4] == (True, False)  # an end in the last turn is an end


def test_a_lone_surrogate_reaches_the_world_as_a_question_mark():
    env = EchoEnv()
    env.reset(seed=0)
    assert env.step("a\ud800b")[0] == "a?b"


def test_a_lone_surrogate_of_the_world_is_a_question_mark():
    class Odd(EchoEnv):
        def _begin(self, *arguments):
            return "\ud800", {}

        def _act(self, action: str):
            return "b\udfff", 0.0, False, False, {}

    env = Odd(render_mode="ansi")
    assert (env.reset(seed=0)[0], env.render(), env.step("x")[0]) == ("?", "?", "b?")


def test_after_a_failure_of_the_world_a_reset_is_needed_and_helps():
    class Failing(EchoEnv):
        def _act(self, action: str):
            if action == "fail":
                raise RuntimeError("broken")
            return super()._act(action)

    env = Failing()
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="broken"):
        env.step("fail")
    with pytest.raises(ResetNeeded):
        env.step("x")
    env.reset(seed=0)
    assert env.step("x")[0] == "x"


def test_vector_envs_do_not_write_into_the_class():
    gym.make_vec("metagym:metagym/Toy-v0", num_envs=2, vectorization_mode="sync").close()
    assert "autoreset_mode" not in TextEnv.metadata


def test_ansi_rendering_shows_the_latest_observation():
    env = EchoEnv(render_mode="ansi")
    observation, _ = env.reset(seed=0)
    assert env.render() == observation
    env.step("hello")
    assert env.render() == "hello"
    assert EchoEnv().render() is None
