import functools
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

from metagym.errors import ContextOverflowError, EngineError
from metagym.protocols import Backend, Chat
from metagym.spaces import Text
from metagym.testing import (
    BAD_ACTIONS,
    ConformanceError,
    FaultyBackend,
    FaultyEnv,
    ScriptedBackend,
    ScriptedChat,
    SimulatedBackend,
    check_text_env,
    long_tail,
    scripted_logprob,
)
from metagym.text_env import NumberedTasks, TextEnv
from metagym.types import Generation, Message, Sampling

STOP = Sampling(max_tokens=5, stop_token_ids=(2,))


class GoodEnv(TextEnv):
    """Counts down from a number that the task and the seed determine. What the broken ones derive from."""

    def __init__(self, render_mode=None, **kwargs):
        world = NumberedTasks(["a", "b"], {"train": range(20)})
        super().__init__(world, max_turns=6, max_chars=2000, render_mode=render_mode, **kwargs)

    def _begin(self, task, seed, rng, options):
        self._left = int(rng.integers(3, 9))
        return f"{task.id}: {self._left}", self._admissible()

    def _act(self, action):
        self._left -= action == "down"
        won = self._left == 0
        return (
            f"{action[:1000]}: {self._left}",
            float(won),
            won,
            False,
            {"success": won, **self._admissible()},
        )

    def _admissible(self):
        return {"admissible": ["down", "wait"]}


class RaisesOnBadAction(GoodEnv):
    def _act(self, action):
        return super()._act(action.encode("ascii").decode())


class IgnoresSeed(GoodEnv):
    def _begin(self, task, seed, rng, options):
        return super()._begin(task, seed, np.random.default_rng(), options)


class UnseededSecondReset(GoodEnv):
    """Deterministic after reset(seed), not after the next reset()."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=time.monotonic_ns() % 2**31 if seed is None else seed, options=options)


class KeepsItsStepCounter(GoodEnv):
    def reset(self, *, seed=None, options=None):
        turn = self._turn
        result = super().reset(seed=seed, options=options)
        self._turn = turn if turn < 6 else 0
        return result


class AliasesItsInfo(GoodEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._list = ["down"]

    def _act(self, action):
        self._list.append(f"wait {len(self._list)}")
        return super()._act(action)

    def _admissible(self):
        return {"admissible": self._list}


class IgnoresTheTask(GoodEnv):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


class AcceptsUnknownTasks(GoodEnv):
    def reset(self, *, seed=None, options=None):
        try:
            return super().reset(seed=seed, options=options)
        except ValueError:
            return super().reset(seed=seed)


class ObservationOutsideOfTheSpace(GoodEnv):
    def _act(self, action):
        _, *rest = super()._act(action)
        return ("x" * 3000, *rest)


class StepsAfterTheEnd(GoodEnv):
    def step(self, action):
        result = super().step(action)
        self._running = True
        return result


class ClosesOnce(GoodEnv):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class AllTasksAlike(GoodEnv):
    def _begin(self, task, seed, rng, options):
        self._left = 3
        return "go", self._admissible()


class StaleSpace(GoodEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observation_space = gym.spaces.Text(2000, min_length=0)


class RejectsItsOwnSamples(Text):
    def contains(self, x):
        return super().contains(x) and "a" not in x


class BadSpace(GoodEnv):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.action_space = RejectsItsOwnSamples(2000)


class NoSuccess(GoodEnv):
    def _info(self, extra):
        info = super()._info(extra)
        del info["success"]
        return info


class NumpyFlags(GoodEnv):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, np.bool_(terminated), truncated, info


class DrawsFromItsOwnGenerator(GoodEnv):
    """Fine alone, and off as soon as another env runs in the same process."""

    shared = np.random.default_rng(0)

    def _begin(self, task, seed, rng, options):
        return super()._begin(task, seed, self.shared, options)


BROKEN = {
    RaisesOnBadAction: "bad actions",
    IgnoresSeed: "determinism",
    UnseededSecondReset: "unseeded reset",
    KeepsItsStepCounter: "determinism",
    AliasesItsInfo: "aliasing",
    IgnoresTheTask: "tasks",
    AcceptsUnknownTasks: "tasks",
    ObservationOutsideOfTheSpace: "episodes",
    StepsAfterTheEnd: "order",
    ClosesOnce: "close",
    AllTasksAlike: "difference",
    StaleSpace: "shared memory",
    BadSpace: "spaces",
    NoSuccess: "episodes",
    NumpyFlags: "episodes",
    DrawsFromItsOwnGenerator: "determinism",
}


def test_a_good_env_passes():
    check_text_env(GoodEnv, seeds_differ=True, vector=False)
    check_text_env(
        functools.partial(gym.make, gym.envs.registration.EnvSpec("Good-v0", GoodEnv)), vector=False
    )


@pytest.mark.parametrize("env", BROKEN, ids=lambda env: env.__name__)
def test_the_suite_names_the_rule_that_a_broken_env_breaks(env):
    with pytest.raises(ConformanceError, match=f"rule '{BROKEN[env]}' is broken"):
        check_text_env(env, vector=False, tasks=6)


def test_seeds_that_make_no_difference_are_found_where_declared():
    class OneSeed(GoodEnv):
        def _begin(self, task, seed, rng, options):
            return super()._begin(task, seed, np.random.default_rng(int(task.id[2:])), options)

    check_text_env(OneSeed, vector=False)
    with pytest.raises(ConformanceError, match="same under 5 seeds"):
        check_text_env(OneSeed, vector=False, seeds_differ=True)


def test_a_spec_that_can_not_be_copied_is_found():
    class Locked(GoodEnv):
        def __init__(self, handle, **kwargs):
            super().__init__(**kwargs)

    spec = gym.envs.registration.EnvSpec("Locked-v0", Locked)
    with pytest.raises(ConformanceError, match="rule 'spec' is broken"):
        check_text_env(lambda: gym.make(spec, handle=threading.Lock()), vector=False)


@pytest.mark.parametrize("fault", ["stream", "task"])
def test_an_env_that_differs_in_a_vector_is_found(fault):
    """Terminal observations were lost and steps added by another automatic reset."""
    made = []

    def make():
        made.append(1)
        # The envs made last are the ones in the vector.
        return GoodEnv() if len(made) < 10 else Shifted()

    class Shifted(GoodEnv):
        def step(self, action):
            observation, reward, terminated, truncated, info = super().step(action)
            if fault == "task":
                return observation, reward, terminated, truncated, {**info, "task": "a:0"}
            return observation + "!", reward, terminated, truncated, info

    with pytest.raises(ConformanceError, match="rule 'vector' is broken: in a SyncVectorEnv"):
        check_text_env(make)


class OneStep(TextEnv):
    """Every episode ends with its first step."""

    def __init__(self, **kwargs):
        super().__init__(NumberedTasks(["a", "b"], {"train": range(20)}), max_chars=2000, **kwargs)

    def _begin(self, task, seed, rng, options):
        self._left, self._key = self._length(seed), int(rng.integers(1000))
        return f"{task.id}: {self._key}", {}

    def _act(self, action):
        self._left -= 1
        won = action == str(self._key)
        return action[:1000], float(won), self._left == 0, False, {"success": won}

    def _length(self, seed):
        return 1


class OneStepInTurns(OneStep):
    """A second step where the seed is 1, as of the second env at its first reset: from then on one of the two
    has always ended."""

    def _length(self, seed):
        return 1 + (seed == 1)


@pytest.mark.parametrize("env", [OneStep, OneStepInTurns])
def test_episodes_of_one_step_pass_in_vectors_too(env):
    check_text_env(env, seeds_differ=True)


def test_bad_actions_hold_what_they_should():
    assert "" in BAD_ACTIONS
    assert any(len(a) >= 10_000 for a in BAD_ACTIONS)
    assert any("<|im_end|>" in a for a in BAD_ACTIONS)
    assert any("\x00" in a for a in BAD_ACTIONS)


# ---------------------------------------------------------------- fakes


def test_scripted_chat():
    chat = ScriptedChat(["a", Message("assistant", "b"), EngineError("c")])
    assert isinstance(chat, Chat)
    user = (Message("user", "hi"),)
    assert chat.chat(user, prefix="> ").content == "> a"
    assert chat.chat(user).content == "b"
    with pytest.raises(EngineError, match="c"):
        chat.chat(user)
    with pytest.raises(EngineError, match="3 replies, this is call 4"):
        chat.chat(user)
    assert chat.calls == [user] * 4
    assert ScriptedChat(lambda messages: messages[-1].content.upper()).chat(user).content == "HI"


def test_scripted_backend():
    backend = ScriptedBackend([[5, 6, 2, 9], [1, 1, 1, 1, 1, 1, 1], [3]])
    assert isinstance(backend, Backend)
    stopped = backend.submit([7], STOP).result()
    assert (stopped.tokens.tolist(), stopped.finish) == ([5, 6, 2], "stop")
    assert stopped.logprobs.tolist() == [-1.5, -1.75, -0.75] == [scripted_logprob(t) for t in (5, 6, 2)]
    backend.load({"w": [1]}, version=4)
    cut = backend.submit([7, 8], STOP).result()
    assert (cut.tokens.tolist(), cut.finish, cut.version.tolist()) == ([1] * 5, "length", [4] * 5)
    assert backend.submit([7], STOP).result().finish == "length"
    with pytest.raises(EngineError, match="3 replies"):
        backend.submit([7], STOP).result()
    assert backend.calls[1] == ((7, 8), STOP)
    backend.close()
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        backend.submit([7], STOP).result()


def test_scripted_backend_in_a_small_context():
    backend = ScriptedBackend(lambda prompt: [prompt[-1]] * 9, context=6)
    assert backend.submit([7, 8], STOP).result().tokens.tolist() == [8] * 4
    with pytest.raises(ContextOverflowError, match="6 tokens leave no room in a context of 6"):
        backend.submit([1] * 6, STOP).result()


def test_scripted_backend_keeps_its_own_copy_of_the_params():
    backend, params = ScriptedBackend([]), {"w": [1]}
    backend.load(params, version=1)
    params["w"].append(2)
    assert backend.params == {"w": [1]}


def faulty(fault, **kwargs) -> FaultyBackend:
    backend = FaultyBackend(ScriptedBackend(lambda prompt: [5, 6, 2]), fault, **kwargs)
    assert isinstance(backend, Backend)
    return backend


def test_faulty_backend_fails_when_asked():
    backend = faulty("error", at=1)
    assert backend.submit([1], STOP).result().finish == "stop"
    with pytest.raises(EngineError, match="as asked"):
        backend.submit([1], STOP).result()
    assert backend.submit([1], STOP).result().finish == "stop"
    with pytest.raises(OSError, match="gone"):
        faulty("error", error=OSError("gone")).submit([1], STOP).result()
    backend.close()


def test_faulty_backend_returns_what_its_type_refuses():
    for fault, logprobs in [("nan", [-1.5, -1.75, np.nan]), ("missing", []), ("short", [-1.5, -1.75])]:
        bad = faulty(fault).submit([1], STOP).result()
        np.testing.assert_array_equal(bad.logprobs, np.array(logprobs, np.float32))
        assert bad.tokens.tolist() == [5, 6, 2]
        with pytest.raises(ValueError, match="Generation"):
            Generation(bad.tokens, bad.logprobs, bad.version, bad.finish)
    aborted = faulty("abort").submit([1], STOP).result()
    assert (aborted.tokens.tolist(), aborted.finish) == ([5], "abort")


def test_faulty_backend_hangs_until_aborted_or_closed():
    backend = faulty("hang")
    first, second = backend.submit([1], STOP), backend.submit([1], STOP)
    with pytest.raises(TimeoutError):
        first.result(timeout=0.01)
    backend.abort(first)
    assert first.cancelled()
    backend.close()
    with pytest.raises(EngineError, match="closed"):
        second.result(timeout=1)


def test_faulty_backend_is_slow():
    threads = threading.active_count()
    backend = faulty("slow", delay_s=0.05)
    future = backend.submit([1], STOP)
    assert not future.done()
    assert future.result(timeout=5).tokens.tolist() == [5, 6, 2]
    backend.close()
    assert threading.active_count() == threads


def test_faulty_env_fails_in_every_episode():
    env = FaultyEnv(GoodEnv(), at=1)
    for _ in range(2):
        env.reset(seed=0)
        env.step("wait")
        with pytest.raises(RuntimeError, match="as asked"):
            env.step("wait")
    with pytest.raises(OSError, match="disk"):
        FaultyEnv(GoodEnv(), at=None, error=OSError("disk")).reset()


# ---------------------------------------------------------------- the simulated engine


def letter(params, ids, rng, n):
    """Tokens that are the weights' own."""
    return np.full(n, 0 if params is None else params, np.int32), np.full(n, -1.0, np.float32)


@pytest.fixture
def simulated():
    made = []

    def make(**kwargs):
        made.append(SimulatedBackend(**{"median": 20, "token_s": 0.002} | kwargs))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
        assert not backend._thread.is_alive()


def test_a_simulated_engine_takes_its_time_and_repeats_itself(simulated):
    backend = simulated()
    assert isinstance(backend, Backend)
    start = time.monotonic()
    generations = [backend.submit([1], Sampling(seed=3)).result(5) for _ in range(2)]
    assert time.monotonic() - start >= 2 * 0.002 * len(generations[0].tokens)
    assert generations[0].tokens.tolist() == generations[1].tokens.tolist()
    assert backend.submit([1], Sampling(seed=3, max_tokens=2)).result(5).finish == "length"
    stopped = backend.submit([1], Sampling(seed=3, stop_token_ids=(99,))).result(5)
    assert (stopped.finish, stopped.tokens[-1]) == ("stop", 99)


def test_weights_that_come_in_the_middle_of_a_reply_sample_its_rest(simulated):
    """16 streams across an update: all survive, and each token is of the version that sampled it."""
    backend = simulated(sigma=0, median=50, sample=letter)
    futures = [backend.submit([1], Sampling(seed=i)) for i in range(16)]
    time.sleep(0.04)
    backend.load(7, 1)
    for future in futures:
        generation = future.result(5)
        assert set(generation.version) == {0, 1}
        assert np.all(np.diff(generation.version) >= 0)
        np.testing.assert_array_equal(generation.tokens, 7 * generation.version)
    assert set(backend.submit([1], Sampling()).result(5).version) == {1}


def test_more_than_its_slots_wait_their_turn(simulated):
    backend = simulated(sigma=0, median=20, slots=2)
    start = time.monotonic()
    futures = [backend.submit([1], Sampling()) for _ in range(6)]
    futures[2].cancel()
    for i in (0, 1, 3, 4):
        futures[i].result(5)
    assert time.monotonic() - start >= 0.08
    assert not futures[5].done()
    backend.abort(futures[5])
    assert futures[5].cancelled()


def test_a_simulated_engine_that_is_closed_lets_nobody_wait(simulated):
    backend = simulated(median=10_000, sigma=0)
    futures = [backend.submit([1], Sampling(max_tokens=10_000)) for _ in range(2)]
    backend.close()
    for future in (*futures, backend.submit([1], Sampling())):
        with pytest.raises(EngineError, match="closed"):
            future.result(5)


def test_the_tail_is_long():
    draws = np.array([long_tail(np.random.default_rng(i), 10, 1.0, 300) for i in range(2000)])
    assert 9 < np.median(draws) < 11
    assert 14 < draws.mean() < 19  # 10 exp(1/2) = 16.5
    assert draws.max() <= 300
