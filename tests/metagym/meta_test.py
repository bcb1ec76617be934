import contextlib
import functools
import json
import threading

import gymnasium as gym
import pytest

import metagym  # noqa: F401 (registers)
from metagym.agents import plain
from metagym.agents.follower import follow, rule_follower
from metagym.envs import rules, toy
from metagym.episode import Agent, run
from metagym.errors import EngineError, FormatError, InputError, UnknownNameError, WorldError
from metagym.meta import (
    REWARDS,
    Actor,
    Batch,
    Candidate,
    Experience,
    Prompting,
    Transcript,
    World,
    read_experience,
)
from metagym.spaces import Text
from metagym.testing import check_text_env
from metagym.types import StopReason, Task, Trajectory, Turn

RULES = "metagym/Rules-v0"


def ict(**kwargs):
    given = {"world": RULES, "actor": rule_follower(), "k": 3, "meta_turns": 3, "types": "doors-red"}
    return gym.make("metagym/ICT-v0", **{**given, **kwargs})


def stored(**kwargs):
    given = {
        "id": "a/0",
        "type": "doors-red",
        "split": "train",
        "world": RULES,
        "world_kwargs": {},
        "prompt": None,
        "observation": "what was seen",
        "batch": (("doors-red:1", 11), ("doors-red:2", 12)),
        "returns": (0.0, 0.5),
        "score": 0.25,
        "next": (("doors-red:3", 13),),
        "held_out": (("doors-red:4", 14),),
    }
    return Experience(**{**given, **kwargs})


def reflect(**kwargs):
    return gym.make("metagym/Reflect-v0", **{"data": [stored()], "actor": rule_follower(), **kwargs})


# ---------------------------------------------------------------- conformance


def test_ict_keeps_the_rules_of_text_envs():
    check_text_env(ict, tasks=2, steps=4, seeds_differ=True)


def test_reflect_keeps_the_rules_of_text_envs(tmp_path):
    (tmp_path / "data.jsonl").write_text(
        json.dumps(stored().record()) + "\n" + json.dumps(stored(id="b", observation="else").record()) + "\n"
    )
    # Every step ends an episode, so there is none that a vector env could be reset in.
    make = functools.partial(reflect, data=str(tmp_path / "data.jsonl"))
    check_text_env(make, tasks=2, steps=2, vector=False)


# ---------------------------------------------------------------- a run


def test_a_run_by_hand():
    with contextlib.closing(ict()) as env:
        text, info = env.reset(seed=4, options={"task": "doors-red:0"})
        assert text.startswith("System prompt: (none)\n\nEpisode 1\n")
        assert text.count("Episode") == 3
        assert info["prompt"] is None
        assert info["meta_turn"] == 0
        assert len(info["returns"]) == 3
        text, reward, terminated, truncated, info = env.step("You should open the red door.")
        assert reward == 1.0 == info["outcome"]
        assert info["success"] is True
        assert text.startswith("System prompt: You should open the red door.\n")
        assert text.count("Right.") == 9
        assert (terminated, truncated) == (False, False)
        _, reward, *_ = env.step("Never open the red door.")
        assert float(reward) < 1
        _, _, terminated, truncated, info = env.step("")
        assert (terminated, truncated) == (True, False)
        assert info["prompt"] is None
        assert [t.system for t in info["trajectories"]] == [None] * 3


def test_no_task_comes_twice_in_a_run_and_all_are_of_its_type_and_split():
    with contextlib.closing(
        ict(k=5, meta_turns=8, split="validation", types=("doors-red", "food-plum"))
    ) as env:
        for seed in range(3):
            _, info = env.reset(seed=seed)
            kind, played = info["task"].rpartition(":")[0], list(info["tasks"])
            for _ in range(8):
                _, _, _, _, info = env.step("x")
                played += info["tasks"]
            assert len(set(played)) == 45
            world = rules.RulesEnv(split="validation", types=kind)
            assert all(world.task(id).split == "validation" for id in played)


def test_more_tasks_of_a_run_are_none_of_its_batches():
    with contextlib.closing(ict(meta_turns=1)) as env:
        _, info = env.reset(seed=0)
        fresh = {id for id, _ in env.unwrapped.fresh()}  # type: ignore[attr-defined]
        _, _, _, _, after = env.step("x")
        assert len({*info["tasks"], *fresh, *after["tasks"]}) == 9


def test_too_few_tasks_are_told():
    env = ict(k=100, meta_turns=8, split="test")
    with contextlib.closing(env), pytest.raises(InputError, match="needs 900 tasks"):
        env.reset(seed=0)


def test_types_of_both_phases_are_disjoint():
    with pytest.raises(InputError, match=r"doors-red.*must be disjoint"):
        ict(types=("doors-red", "food-plum"), held_out=("doors-red", "keys-iron-oak"))
    with pytest.raises(InputError, match="must be disjoint"):
        reflect(held_out="doors-red")
    ict(types=("doors-red",), held_out=("food-plum",)).close()


@pytest.mark.parametrize("world", [rules, toy])
def test_tasks_of_the_splits_are_disjoint(world):
    made = {"train", "validation", "test"}
    assert set(world.SPLITS) == made
    numbers = [set(r) for r in world.SPLITS.values()]
    assert sum(map(len, numbers)) == len(set.union(*numbers))


def test_the_same_seed_makes_the_same_batches_and_others_others():
    def batches(env, seed, prompts):
        _, info = env.reset(seed=seed, options={"task": "doors-red:3"})
        found = [(info["batch"], info["returns"])]
        for prompt in prompts:
            _, _, _, _, info = env.step(prompt)
            found.append((info["batch"], info["returns"]))
        return found

    with contextlib.closing(ict()) as one, contextlib.closing(ict(workers=1)) as other:
        first = batches(one, 1, ["a", "b", "c"])
        batches(other, 2, ["a"])
        assert batches(other, 1, ["a", "b", "c"]) == first
        assert [b for b, _ in batches(other, 1, ["open the red door"] * 3)] == [b for b, _ in first]
        assert batches(other, 2, ["a", "b", "c"]) != first


# ---------------------------------------------------------------- what the actor gets


def listening(heard):
    def chat(messages):
        heard.append(messages)
        return "open the red door"

    return chat


def test_no_prompt_is_no_system_message_whatever_the_agent_has():
    heard = []
    actor = Actor(lambda seed: listening(heard), agent=Agent(system="of the agent"))
    with contextlib.closing(ict(actor=actor, k=1)) as env:
        env.reset(seed=0)
        assert all(m.role != "system" for messages in heard for m in messages)
        heard.clear()
        env.step("Be good.")
        assert [m.content for m in heard[0] if m.role == "system"] == ["Be good."]
        heard.clear()
        env.step("   ")
        assert all(m.role != "system" for messages in heard for m in messages)


@pytest.mark.parametrize(
    ("action", "prompt", "analysis"),
    [
        ("Open it.", "Open it.", ""),
        ("They failed.\n<prompt>Open it.</prompt> Done.", "Open it.", "They failed.\n Done."),
        ("<prompt>Open it.", "Open it.", ""),
        ("<analysis>They failed.</analysis>\nOpen it.", "Open it.", "They failed."),
        ("<ANALYSIS>They failed.", None, "They failed."),
        ("", None, ""),
        ("so: <prompt>  </prompt>", None, "so:"),
    ],
)
def test_the_analysis_is_kept_and_not_given(action, prompt, analysis):
    assert Prompting().read(action) == Candidate(prompt, analysis, 0)


def test_the_length_of_a_prompt_is_capped_and_told():
    hooks = Prompting(max_prompt=10)
    assert hooks.read("x" * 15) == Candidate("x" * 10, "", 5)
    with contextlib.closing(ict(hooks=hooks)) as env:
        env.reset(seed=0)
        assert env.step("y" * 12)[4]["prompt_cut"] == 2


def test_the_actors_sampling_and_version_are_in_the_record_and_must_not_change():
    told = {"version": 3, "sampling": {"temperature": 0.7}}
    actor = Actor(lambda seed: follow, agent=rule_follower().agent, about=lambda: dict(told))
    with contextlib.closing(ict(actor=actor)) as env:
        assert env.reset(seed=0)[1]["actor"] == [told]
        told["version"] = 4
        with pytest.raises(InputError, match=r"must be frozen"):
            env.step("x")
        assert env.reset(seed=0)[1]["actor"] == [told]


def test_sampling_seeds_differ_between_episodes_and_repeat_with_the_seed():
    seeds = []

    def new_chat(seed):
        seeds.append(seed)
        return follow

    with contextlib.closing(ict(actor=Actor(new_chat, agent=rule_follower().agent), workers=1)) as env:
        env.reset(seed=0)
        env.step("x")
        first = list(seeds)
        seeds.clear()
        env.reset(seed=0, options={"task": env.unwrapped._episode[0].id})  # type: ignore[attr-defined]
        env.step("y")
    assert seeds == first
    assert len(set(first)) == 6


def test_chats_are_closed_when_their_episode_is_over():
    class Session:
        closed = 0

        def chat(self, messages, *, prefix=""):
            raise FormatError("no")

        def close(self):
            Session.closed += 1

    with contextlib.closing(ict(actor=Actor(lambda seed: Session()))) as env:
        env.reset(seed=0)
        assert Session.closed == 3
    shared = Session()
    with contextlib.closing(ict(actor=shared)) as env:
        env.reset(seed=0)
    assert Session.closed == 3


def test_the_episodes_of_a_batch_are_played_at_the_same_time():
    barrier = threading.Barrier(4, timeout=20)

    def chat(messages):
        if len(messages) == 1:
            barrier.wait()  # passes when four episodes are at their first turn
        return "x"

    with contextlib.closing(ict(actor=chat, k=4)) as env:
        env.reset(seed=0)


def test_several_actors_play_every_batch():
    def never(messages):
        return "open the blue door"

    with contextlib.closing(ict(actor=[rule_follower(), never])) as env:
        env.reset(seed=0)
        _, reward, _, _, info = env.step("Open the red door.")
    assert info["returns"] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert reward == 0.5
    assert info["success"] is False
    assert [t.task.id for t in info["trajectories"]] == info["tasks"] * 2


def test_what_is_no_actor_is_told():
    with pytest.raises(InputError, match="got int"):
        ict(actor=3)
    with pytest.raises(InputError, match="empty"):
        ict(actor=[])


# ---------------------------------------------------------------- faults


class Faulty:
    """An actor that is told something, and fails as often as the table says for its task's first words."""

    def __init__(self, failures):
        self.failures, self.lock = failures, threading.Lock()

    def actor(self):
        return Actor(lambda seed: self.chat, agent=rule_follower().agent)

    def chat(self, messages):
        told = messages[0].role == "system"
        place = messages[1 if told else 0].content.split(".")[0]
        with self.lock:
            if told and self.failures.get(place, 0) > 0:
                self.failures[place] -= 1
                raise EngineError("down")
        return follow(messages)


def told(env):
    """Where the tasks are that come after the first prompt, and what info tells of them."""
    env.reset(seed=0, options={"task": "doors-red:0"})
    text, reward, _, _, info = env.step("Open the red door.")
    return [t.turns[0].observation.split(".")[0] for t in info["trajectories"]], info, text, reward


def test_an_infrastructure_fault_is_played_again():
    with contextlib.closing(ict()) as env:
        (one, *_), *_ = told(env)
    faulty = Faulty({one: 2})
    with contextlib.closing(ict(actor=faulty.actor(), retries=2)) as env:
        _, info, _, _ = told(env)
    assert faulty.failures == {one: 0}
    assert info["returns"] == [1.0, 1.0, 1.0]
    assert info["failed"] == 0


def test_a_fault_that_stays_is_left_out_of_observation_and_reward():
    with contextlib.closing(ict()) as env:
        found, *_ = told(env)
    gone = found[1]
    assert len(set(found)) == 3
    with contextlib.closing(ict(actor=Faulty({gone: 99}).actor(), retries=1)) as env:
        _, info, text, reward = told(env)
    assert reward == 1.0  # not 2/3
    assert info["returns"] == [1.0, 1.0]
    assert info["failed"] == 1
    assert info["failures"][0].stop == StopReason.INFRA
    assert gone not in text
    assert len(info["tasks"]) == 3


def test_a_batch_of_which_nothing_counts_leaves_the_loss():
    def down(messages):
        raise EngineError("down")

    with contextlib.closing(ict(actor=down, retries=0)) as env, pytest.raises(WorldError, match="down"):
        env.reset(seed=0)
    with contextlib.closing(reflect(actor=down, retries=0)) as env:
        played = run(env, lambda messages: "Open the red door.", "a/0", seed=0)
    assert played.stop == StopReason.INFRA
    assert not played.stop.in_loss


def test_the_actors_own_failures_count():
    def nonsense(messages):
        raise FormatError("what?")

    with contextlib.closing(reflect(actor=nonsense)) as env:
        played = run(env, lambda messages: "x", "a/0", seed=0)
    assert played.stop == StopReason.TERMINATED
    assert played.reward == 0.0


# ---------------------------------------------------------------- stored experience


class Sure(gym.Env):
    """A world of one turn; the reward is in the task."""

    observation_space = action_space = Text(100)

    def __init__(self, split="train", types=None):
        self.tasks = [Task(f"t:{n}", "t", "train") for n in range(100)]
        self.types = ("t",)

    def task(self, id):
        found = next((t for t in self.tasks if t.id == id), None)
        if found is None:
            raise UnknownNameError("task", id, [])
        return found

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now = (options or {}).get("task", "t:0")
        return self.now, {"task": self.now, "seed": seed, "success": False}

    def step(self, action):
        value = float(self.now.rpartition(":")[2]) / 100 if action == "yes" else 0.0
        return "over", value, True, False, {"task": self.now, "success": False}


@pytest.fixture
def sure():
    gym.register("Sure-v0", entry_point=Sure)  # pyright: ignore[reportArgumentType]
    yield {"world": "Sure-v0", "type": "t", "batch": (("t:10", 0), ("t:30", 0)), "returns": (0.05, 0.1)} | {
        "score": 0.075,
        "next": (("t:50", 0),),
        "held_out": (("t:90", 0), ("t:70", 0)),
    }
    del gym.registry["Sure-v0"]


def obeys(messages):
    return messages[0].content if messages[0].role == "system" else "no"


@pytest.mark.parametrize(
    ("reward", "value"),
    [("previous", 0.2), ("next", 0.5), ("both", 0.35), ("gain", 0.125), ("held_out", 0.8)],
)
def test_rewards(sure, reward, value):
    assert reward in REWARDS
    with contextlib.closing(reflect(data=[stored(**sure)], actor=obeys, reward=reward)) as env:
        text, info = env.reset(seed=0)
        assert text == "what was seen"
        assert info["returns"] == [0.05, 0.1]
        _, got, terminated, _, info = env.step("yes")
        assert got == pytest.approx(value)
        assert info["outcome"] == pytest.approx(value)
        assert terminated
        assert info["success"] is False  # some reward is no success
        played = run(env, lambda messages: "yes", "a/0", seed=0)
        assert played.outcome == pytest.approx(value)


def test_a_world_tells_what_success_is_not_the_reward(sure):
    with contextlib.closing(
        gym.make("metagym/ICT-v0", world="Sure-v0", actor=obeys, k=2, prompt="yes")
    ) as env:
        _, info = env.reset(seed=0)
        assert info["outcome"] > 0
        assert info["success"] is False


def test_members_of_a_group_see_the_same_and_are_measured_on_the_same():
    with contextlib.closing(reflect()) as one, contextlib.closing(reflect()) as other:
        assert one.reset(seed=5)[0] == other.reset(seed=5)[0] == "what was seen"
        a = one.step("Open the blue door.")
        b = other.step("Open the blue door.")
        assert a[1] == b[1]
        assert a[4]["tasks"] == b[4]["tasks"] == ["doors-red:1", "doors-red:2"]
        assert [t.seed for t in a[4]["trajectories"]] == [11, 12]


def test_experience_survives_its_file(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(stored().record()) + "\n" + '{"id": "half')
    assert read_experience(file) == [stored()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no experience"),
        ("{}\n", "line 1: not a stored experience"),
        ("nonsense\n", "line 1"),
        (json.dumps({**stored().record(), "colour": 1}) + "\n", "no field 'colour'"),
        (json.dumps({**stored().record(), "batch": []}) + "\n", "empty batch"),
    ],
)
def test_damaged_experience_is_told(tmp_path, text, message):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        read_experience(file)


def test_missing_experience_is_told(tmp_path):
    with pytest.raises(InputError, match="metagym ict collect"):
        read_experience(tmp_path / "absent.jsonl")
    with pytest.raises(UnknownNameError, match="previous"):
        reflect(reward="prevoius")
    with pytest.raises(InputError, match="needs `next`"):
        reflect(data=[stored(next=())], reward="next")


# ---------------------------------------------------------------- transcripts


def played(turns, reward=0.0, final="The end."):
    task = Task("w:1", "w", "train")
    return Trajectory(task, 0, tuple(turns), (), reward, reward, StopReason.TERMINATED, final=final)


def test_a_transcript_says_what_was_done():
    turns = [
        Turn("A door.", "Let me see.\nAction: open it", "open it", 0.0),
        Turn("It is open.", "fly!!", None, 0.0),
        Turn("What?", "leave", "leave", 1.0),
    ]
    batch = Batch(Candidate("Be good."), (played(turns, 1.0),))
    assert Transcript()(batch) == (
        "System prompt: Be good.\n\nEpisode 1\nA door.\n> open it\nIt is open.\n> (no action: fly!!)\n"
        "What?\n> leave\nThe end.\nReturn: 1.00"
    )
    short = Transcript(
        head="",
        episode="",
        turn="{observation}\n{mark} {action}",
        later="{mark} {action} {reward:g}",
        final="",
        end="",
    )
    assert short(batch) == "A door.\n- open it\n- (no action: fly!!) 0\n+ leave 1"


def test_an_unparsable_reply_is_in_the_transcript():
    actor = Actor(lambda seed: lambda messages: "I ponder", agent=Agent(parse=_refuse, max_format_errors=2))
    with contextlib.closing(ict(actor=actor, k=1)) as env:
        text, info = env.reset(seed=0)
    assert text.count("> (no action: I ponder)") == 2
    assert info["trajectories"][0].stop == StopReason.FORMAT_ERROR


def _refuse(reply):
    raise FormatError("Say it in JSON.")


def test_long_transcripts_are_shortened_by_rules_that_are_shown():
    turns = [Turn(f"room {i} " + "x" * 50, f"go {i}", f"go {i}", 0.0) for i in range(40)]
    batch = Batch(Candidate("p" * 3000), (played(turns), played(turns[:2])))
    for limit in (200, 500, 1000, 2000, 4000):
        text = Transcript(max_chars=limit)(batch)
        assert len(text) <= limit
        assert text.startswith(f"(Shortened to {limit} characters")
    assert "turns left out ...]" in text
    assert "> go 0" in text  # first and last turns stay
    assert "> go 39" in text
    assert "> go 20" not in text
    assert "room 1 " in text.split("Episode 2")[1]  # a short episode is whole
    assert Transcript(max_chars=200_000)(batch).count("left out") == 0


def test_a_wrong_layout_is_told():
    with pytest.raises(InputError, match="observatoin"):
        Transcript(turn="{observatoin}")
    with pytest.raises(InputError, match="max_chars"):
        Transcript(max_chars=10)


# ---------------------------------------------------------------- other worlds


class Counting(gym.Env):
    """Somebody else's text env, which lists no tasks: say the number that the seed made."""

    observation_space = action_space = Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(10))
        return f"Say {self.number}.", {}

    def step(self, action):
        return "", float(action == str(self.number)), True, False, {}


@pytest.fixture
def counting():
    gym.register("Counting-v0", entry_point=Counting)  # pyright: ignore[reportArgumentType]
    yield "Counting-v0"
    del gym.registry["Counting-v0"]


def says(messages):
    return messages[-1].content.removeprefix("Say ").rstrip(".") if len(messages) > 1 else "?"


def test_an_env_without_tasks_has_those_of_its_seeds(counting):
    with contextlib.closing(gym.make("metagym/ICT-v0", world=counting, actor=says, split="test", k=2)) as env:
        _, info = env.reset(seed=0)
        assert info["returns"] == [0.0, 0.0]
        assert all(id.startswith("Counting-v0:9") for id in info["tasks"])
        _, reward, *_ = env.step("repeat it")
        assert reward == 1.0
    e = stored(world=counting, type=counting, batch=[["Counting-v0:5", 1]], next=(), held_out=())
    with contextlib.closing(reflect(data=[e], actor=says)) as env:
        env.reset(seed=0)
        assert env.step("repeat it")[1] == 1.0


def test_wrong_worlds_are_told(counting):
    with pytest.raises(UnknownNameError, match="metagym/Rules-v0"):
        ict(world="metagym/Rulse-v0")
    with pytest.raises(InputError, match="colour"):
        ict(world_kwargs={"colour": 1})
    with pytest.raises(UnknownNameError, match="doors-red"):
        ict(types="doors-rde")
    with pytest.raises(UnknownNameError, match="train"):
        World(counting, split="trian")


def test_tasks_of_all_types_may_be_mixed():
    with contextlib.closing(ict(types=None, mixed=True, k=20, meta_turns=1)) as env:
        _, info = env.reset(seed=0)
        assert info["task"].startswith("mixed:")
        assert len({id.rpartition(":")[0] for id in info["tasks"]}) > 10


def test_the_actors_agent_is_used():
    actor = Actor(lambda seed: follow, agent=plain(format="", list_actions=True), max_turns=1)
    with contextlib.closing(ict(actor=actor)) as env:
        env.reset(seed=0)
        _, reward, *_ = env.step("Open the red door.")
    assert reward == pytest.approx(1 / 3)  # one try of three
