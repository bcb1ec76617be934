import copy
import pickle

import gymnasium as gym
import pytest
from gymnasium.vector import AsyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from metagym.errors import InputError
from metagym.spaces import Text, clean

WORLDS = ["metagym/Toy-v0"]


@pytest.mark.parametrize("world", WORLDS)
def test_the_declared_spaces_hold_their_own_samples(world):
    """A text space must not sample what its own `contains` rejects."""
    env = gym.make(f"metagym:{world}")
    for space in (env.observation_space, env.action_space):
        space.seed(3)
        assert all(space.contains(space.sample()) for _ in range(200))
    env.close()


def test_a_charset_of_several_characters_is_refused():
    with pytest.raises(ValueError, match="single characters, got 'ab', 'cd'"):
        Text(10, charset={"ab", "cd"})
    with pytest.raises(ValueError, match="single characters"):
        Text(10, charset=["a", ""])
    with pytest.raises(ValueError, match="empty charset"):
        Text(10, charset="")
    with pytest.raises(InputError, match="min_length"):
        Text(2, min_length=3)


def test_what_is_a_text():
    space = Text(5)
    for text in ("", "a\nb", "é", "世界", "😀", "\x00", "a b", "<|x|"):
        assert text in space
    for other in ("123456", b"a", None, 3, ["a"], "\ud800"):
        assert other not in space
    assert "" not in Text(5, min_length=1)
    assert "ab" in Text(5, charset="ab")
    assert "abc" not in Text(5, charset="ab")


@given(st.integers(0, 30), st.integers(0, 200), st.none() | st.text(min_size=1), st.integers(0, 2**31))
def test_samples_are_contained_for_any_bounds_and_charset(low, more, charset, seed):
    space = Text(low + more, min_length=low, charset=charset, seed=seed)
    samples = [space.sample() for _ in range(5)]
    assert all(s in space for s in samples)
    assert space.from_jsonable(space.to_jsonable(samples)) == samples


@given(st.text() | st.text(st.characters(categories=["Cs", "L"])))
def test_cleaned_text_is_in_the_space_and_valid_text_unchanged(text):
    assert clean(text) in Text(10_000)
    assert clean(text) == text or any("\ud800" <= c <= "\udfff" for c in text)


def test_copies_are_equal_and_seeding_repeats_samples():
    space = Text(50, min_length=1, charset="xyz")
    for same in (
        copy.deepcopy(space),
        pickle.loads(pickle.dumps(space)),
        Text(50, min_length=1, charset="zyx"),
    ):
        assert same == space
        assert hash(same) == hash(space)
    assert space != Text(50, min_length=1)
    space.seed(1)
    first = [space.sample() for _ in range(5)]
    space.seed(1)
    assert first == [space.sample() for _ in range(5)]
    assert repr(space) == "Text(50, min_length=1, charset='xyz')"
    with pytest.raises(InputError, match="mask"):
        space.sample(mask=(None, None))


def test_shared_memory_is_refused_in_a_sentence():
    """Texts in shared memory turned into stale "0000…" without a word."""
    with pytest.raises(InputError, match="shared_memory=False"):
        AsyncVectorEnv([lambda: gym.make("metagym:metagym/Toy-v0")], shared_memory=True)
