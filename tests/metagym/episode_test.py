import asyncio
import threading

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from metagym import errors
from metagym.agents import plain
from metagym.episode import Agent, run, stop_reason
from metagym.errors import FormatError, InputError
from metagym.spaces import Text
from metagym.testing import FaultyEnv, ScriptedChat
from metagym.types import Message, StopReason, Task

TASK = "doors-red:5"
RED = "open red door"


def toy(**kwargs) -> gym.Env:
    return gym.make("metagym:metagym/Toy-v0", **kwargs)


class Scripted(gym.Env):
    """Does what it was told to: an exception is raised, anything else returned."""

    observation_space = action_space = Text(1000)

    def __init__(self, *steps, reset=("start", {})):
        self._steps, self._start = list(steps), reset

    def reset(self, *, seed=None, options=None):
        return self._give(self._start)

    def step(self, action):
        return self._give(self._steps.pop(0))

    def _give(self, result):
        if isinstance(result, BaseException):
            raise result
        return result


def test_a_won_episode():
    env = toy()
    trajectory = run(env, ScriptedChat([f" {RED}\n"] * 3), TASK, seed=3)
    assert trajectory.task == Task(TASK, "doors-red", "train")
    assert (trajectory.seed, trajectory.reward, trajectory.outcome) == (3, 1.0, 1.0)
    assert (trajectory.stop, trajectory.error) == (StopReason.TERMINATED, None)
    assert [(t.reply, t.action, t.reward) for t in trajectory.turns] == [(f" {RED}\n", RED, 1 / 3)] * 3
    assert trajectory.turns[0].observation.startswith("There are 3 rounds")
    assert trajectory.metrics["turns"] == 3
    assert trajectory.metrics["seconds"] >= trajectory.metrics["env_seconds"] >= 0
    assert trajectory.system is None
    assert trajectory.traces == ()
    env.reset()  # was not closed


def test_what_the_world_measured_is_among_the_metrics():
    told = [{"metrics": {"commands": 1}}, {"metrics": {"commands": 2, "grading_seconds": 0.5}}, {}]
    env = Scripted(*(("next", 0.0, i == 2, False, info) for i, info in enumerate(told)))
    metrics = run(env, ScriptedChat(["a"] * 3), None, seed=0).metrics
    assert (metrics["commands"], metrics["grading_seconds"], metrics["turns"]) == (2.0, 0.5, 3.0)


def test_the_last_observation_and_reward_of_the_episode_are_kept():
    """Trainers read the observation after an automatic reset as the terminal one."""
    trajectory = run(toy(), ScriptedChat([RED] * 3), TASK, seed=3)
    assert trajectory.final == "Right! The end: 3 of 3 right."
    assert trajectory.turns[-1].reward == 1 / 3
    envs = SyncVectorEnv([lambda: toy(tasks=[TASK])], autoreset_mode=AutoresetMode.NEXT_STEP)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    envs.reset(seed=3)
    for _ in range(3):
        observations, rewards, terminated, *_ = envs.step([RED])
    assert (observations[0], rewards[0], terminated[0]) == (trajectory.final, 1 / 3, True)


def test_what_the_model_is_shown():
    chat = ScriptedChat(["yellow door", "nonsense", RED, RED])
    trajectory = run(toy(), chat, TASK, seed=3, system="Be good.")
    assert trajectory.system == "Be good."
    last = chat.calls[-1]
    assert [m.role for m in last] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert [m.content for m in last[1::2]] == [t.observation for t in trajectory.turns]
    assert [m.content for m in last[2::2]] == ["yellow door", "nonsense", RED]
    for before, after in zip(chat.calls, chat.calls[1:], strict=False):
        assert after[: len(before)] == before  # only new messages are added


def test_the_system_prompt_of_the_call_goes_before_the_agents():
    for given_, agent, expected in [("a", "b", "a"), (None, "b", "b"), ("", "b", ""), (None, None, None)]:
        chat = ScriptedChat([RED])
        run(toy(), chat, TASK, seed=0, system=given_, agent=Agent(system=agent), max_turns=1)
        assert [m.content for m in chat.calls[0] if m.role == "system"] == (
            [] if expected is None else [expected]
        )


def test_without_history_every_turn_is_a_conversation_of_its_own():
    def parse(reply: str) -> str:
        if reply == "bad":
            raise FormatError("Try again.")
        return reply

    chat = ScriptedChat(["bad", RED, RED])
    agent = Agent(history=False, parse=parse, prompt=lambda o, i, t: f"{t}|{o}")
    trajectory = run(toy(), chat, TASK, seed=3, agent=agent, max_turns=3, system="S")
    assert [[m.role for m in call] for call in chat.calls] == [["system", "user"]] * 3
    texts = [call[1].content for call in chat.calls]
    assert texts[0].startswith("0|There are")
    assert texts[1] == "1|Try again.\n\n" + texts[0][2:]
    assert texts[2].startswith("2|Right!")
    assert [t.action for t in trajectory.turns] == [None, RED, RED]


def test_a_refused_reply_gets_feedback_uses_a_turn_and_does_not_move_the_world():
    def parse(reply: str) -> str:
        if "!" in reply:
            raise FormatError("No exclamation marks.")
        return reply

    chat = ScriptedChat(["a!", "b!", RED, "c!", RED, RED])
    trajectory = run(toy(max_turns=3), chat, TASK, seed=3, agent=Agent(parse=parse))
    assert trajectory.stop == StopReason.TERMINATED
    assert trajectory.outcome == 1.0
    assert [t.action for t in trajectory.turns] == [None, None, RED, None, RED, RED]
    assert chat.calls[1][-1] == Message("user", "No exclamation marks.")
    assert trajectory.metrics["format_errors"] == 3

    trajectory = run(toy(), lambda m: "a!", TASK, seed=3, agent=Agent(parse=parse, max_format_errors=2))
    assert (trajectory.stop, len(trajectory.turns), trajectory.outcome) == (StopReason.FORMAT_ERROR, 2, 0.0)
    assert trajectory.stop.in_loss


def test_the_begun_reply_is_part_of_the_reply():
    seen = []

    class Chat:
        def chat(self, messages, *, prefix=""):
            seen.append(prefix)
            return Message("assistant", prefix + "red door")

    agent = plain(prefix="open ")
    for chat in (Chat(), lambda m: "red door", lambda m: "open red door"):
        trajectory = run(toy(), chat, TASK, seed=0, agent=agent, max_turns=1)
        assert trajectory.turns[0].reply == "open red door"
        assert trajectory.turns[0].reward == 1 / 3
    assert seen == ["open "]


def test_limits():
    assert run(toy(), lambda m: "wait", TASK, seed=0, max_turns=2).stop == StopReason.TURN_LIMIT
    trajectory = run(toy(max_turns=4), lambda m: "wait", TASK, seed=0)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.TURN_LIMIT, 4)
    won = run(toy(max_turns=3), lambda m: RED, TASK, seed=0, max_turns=3)
    assert (won.stop, won.outcome) == (StopReason.TERMINATED, 1.0)


def test_the_wall_clock_is_looked_at_between_calls(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("metagym.episode.time.monotonic", lambda: now[0])

    def chat(messages):
        now[0] += 4
        return RED

    trajectory = run(toy(), chat, TASK, seed=0, timeout_s=6)
    assert trajectory.stop == StopReason.AGENT_TIMEOUT
    assert [t.action for t in trajectory.turns] == [RED, None]  # the second came too late to be done
    assert trajectory.metrics["model_seconds"] == 8
    assert run(toy(), chat, TASK, seed=0, timeout_s=0).turns == ()


class CustomAgentError(errors.AgentError):
    pass


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (errors.FormatError("x"), StopReason.FORMAT_ERROR),
        (errors.ContextOverflowError("x"), StopReason.CONTEXT_OVERFLOW),
        (errors.TokenLimitError("x"), StopReason.TOKEN_LIMIT),
        (errors.ResourceLimitError("x"), StopReason.RESOURCE_LIMIT),
        (CustomAgentError("x"), StopReason.TERMINATED),
        (errors.EngineError("x"), StopReason.INFRA),
        (errors.WorldError("x"), StopReason.INFRA),
        (errors.SandboxError("x"), StopReason.INFRA),
        (errors.HarnessError("x"), StopReason.INFRA),
        (errors.GraderError("x"), StopReason.INVALID_REWARD),
        (errors.InputError("x"), StopReason.INFRA),
        (RuntimeError("x"), StopReason.INFRA),
        (MemoryError("x"), StopReason.INFRA),
        (RecursionError("x"), StopReason.INFRA),
        (TypeError("x"), StopReason.INFRA),
        (TimeoutError("x"), StopReason.INFRA),
        (BaseException("x"), StopReason.INFRA),  # such as a panic in a compiled library
    ],
)
def test_every_error_of_the_chat_and_of_the_world_becomes_a_stop_reason(error, stop):
    in_chat = run(toy(), ScriptedChat([RED, error]), TASK, seed=0)
    in_step = run(FaultyEnv(toy(), at=1, error=error), lambda m: RED, TASK, seed=0)
    for trajectory, where, turns in ((in_chat, "chat", 1), (in_step, "env.step", 2)):
        assert trajectory.stop == stop == stop_reason(error)
        assert trajectory.error is not None
        assert trajectory.error.startswith(where)
        assert f"{type(error).__name__}: x" in trajectory.error
        assert len(trajectory.turns) == turns
        assert (trajectory.reward, trajectory.outcome) == (1 / 3, 0.0)
        assert trajectory.task.id == TASK
    assert in_step.turns[1].action == RED  # what it tried
    if not isinstance(error, InputError | TypeError):
        in_reset = run(FaultyEnv(toy(), at=None, error=error), lambda m: RED, TASK, seed=0)
        assert (in_reset.stop, in_reset.turns, in_reset.task.id) == (stop, (), TASK)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), asyncio.CancelledError()])
def test_what_is_not_the_episodes_to_handle_is_raised(error):
    for env, chat in [
        (toy(), ScriptedChat([RED, error])),
        (FaultyEnv(toy(), at=1, error=error), lambda m: RED),
        (FaultyEnv(toy(), at=None, error=error), lambda m: RED),
    ]:
        with pytest.raises(type(error)):
            run(env, chat, TASK, seed=0)


def test_an_unexpected_error_tells_where_it_was_raised():
    trajectory = run(toy(), ScriptedChat([ZeroDivisionError("oh \ud800" + "x" * 5000)]), TASK, seed=0)
    assert trajectory.error is not None
    assert trajectory.error.startswith("chat: ZeroDivisionError: oh ?xx")
    assert len(trajectory.error) < 2100
    assert "testing.py:" in (run(FaultyEnv(toy()), lambda m: RED, TASK, seed=0).error or "")


@pytest.mark.parametrize("reply", [None, b"x", 3, ["x"]])
def test_a_chat_that_returns_no_text_is_a_failure_of_the_chat(reply):
    trajectory = run(toy(), lambda m: reply, TASK, seed=0)
    assert trajectory.stop == StopReason.INFRA
    assert "TypeError: chat returned" in (trajectory.error or "")


def test_a_broken_agent_ends_the_episode_and_not_the_run():
    def broken(*_):
        raise IndexError("x")

    for agent, where in ((Agent(parse=broken), "agent.parse"), (Agent(prompt=broken), "agent.prompt")):
        trajectory = run(toy(), lambda m: RED, TASK, seed=0, agent=agent)
        assert trajectory.stop == StopReason.INFRA
        assert (trajectory.error or "").startswith(f"{where}: IndexError: x")
    not_text = run(toy(), lambda m: RED, TASK, seed=0, agent=Agent(parse=lambda r: 3))  # type: ignore[arg-type]
    assert "TypeError: an action is a str" in (not_text.error or "")


def test_the_callers_mistakes_are_raised():
    with pytest.raises(InputError, match=r"unknown task 'doors-rde:5'. Did you mean 'doors-red:5'"):
        run(toy(), lambda m: RED, "doors-rde:5", seed=0)
    with pytest.raises(InputError, match="in split 'test'"):
        run(toy(), lambda m: RED, Task("doors-red:9500", "doors-red", "test"), seed=0)
    with pytest.raises(TypeError, match="chat must"):
        run(toy(), "hello", TASK, seed=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="task must"):
        run(toy(), lambda m: RED, 3, seed=0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="max_turns"):
        run(toy(), lambda m: RED, TASK, seed=0, max_turns=0)
    with pytest.raises(InputError, match="pass task=None"):
        run(Scripted(), lambda m: RED, "x", seed=0)


def test_without_a_task_the_env_draws_one():
    trajectory = run(toy(), lambda m: "?", None, seed=4, max_turns=1)
    again = run(toy(), lambda m: "?", trajectory.task, seed=4, max_turns=1)
    assert trajectory.task.type in trajectory.task.id
    assert again.turns == trajectory.turns


def test_an_env_that_lists_no_tasks_can_be_played():
    trajectory = run(Scripted(("end", 2.5, True, False, {})), lambda m: "go", None, seed=0)
    assert (trajectory.reward, trajectory.outcome, trajectory.final) == (2.5, 2.5, "end")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_no_number_is_not_trained_on(reward):
    steps = [("a", 1.0, False, False, {}), ("b", reward, True, False, {"success": True})]
    trajectory = run(Scripted(*steps), lambda m: "go", None, seed=0)
    assert trajectory.stop == StopReason.INVALID_REWARD
    assert not trajectory.stop.in_loss
    assert (trajectory.reward, trajectory.outcome, len(trajectory.turns)) == (1.0, 0.0, 2)


def test_the_world_can_name_the_end_and_what_was_done():
    info = {"stop": StopReason.SUBMITTED, "success": True, "action": "submit now"}
    trajectory = run(Scripted(("bye", 0.5, True, False, info)), lambda m: "submit", None, seed=0)
    assert (trajectory.stop, trajectory.outcome) == (StopReason.SUBMITTED, 1.0)
    assert (trajectory.turns[0].reply, trajectory.turns[0].action) == ("submit", "submit now")
    nothing = run(toy(), lambda m: "dance", TASK, seed=0, max_turns=1).turns[0]
    assert (nothing.reply, nothing.action) == ("dance", None)
    truncated = run(Scripted(("", 0.0, False, True, {"stop": "resource_limit"})), lambda m: "x", None, seed=0)
    assert truncated.stop == StopReason.RESOURCE_LIMIT


def test_malformed_envs_are_world_failures():
    for env in (Scripted((1, 0.0, False, False, {})), Scripted(("x", 0.0)), Scripted(reset=(3, {}))):
        trajectory = run(env, lambda m: "x", None, seed=0)
        assert trajectory.stop == StopReason.INFRA


def test_a_hanging_world_holds_only_its_own_thread():
    env = FaultyEnv(toy(), "hang", at=1)
    result = []
    thread = threading.Thread(target=lambda: result.append(run(env, lambda m: RED, TASK, seed=0)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    env.release()
    thread.join(10)
    assert result[0].outcome == 1.0


@given(st.lists(st.text() | st.sampled_from([RED, "red"]), max_size=6), st.integers(0, 2**40))
def test_any_replies_give_a_trajectory_that_adds_up(replies, seed):
    trajectory = run(toy(), ScriptedChat(replies), TASK, seed=seed)
    assert trajectory.reward == pytest.approx(sum(t.reward for t in trajectory.turns))
    ended = trajectory.stop == StopReason.TERMINATED
    assert ended != (trajectory.stop == StopReason.INFRA)  # the script is at its end
    assert len(trajectory.turns) == (len(replies) if not ended else trajectory.metrics["turns"])
