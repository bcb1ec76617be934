"""Spaces: Unicode text.

Gymnasium's own `Text` refuses `""`, blanks, newlines and "é" unless each character is listed.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import shared_memory

from metagym.errors import InputError

# What samples are drawn from when no charset is given: enough kinds to find a world that assumes ASCII.
_SAMPLED = "".join(map(chr, range(32, 127))) + "\n\téüßñΩжあ世界한‮😀"
_SAMPLED_LENGTH = 64


def clean(text: str) -> str:
    """The text as valid Unicode: a lone surrogate, which no file or socket can take, becomes "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_valid(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class Text(Space[str]):
    """Every Unicode text of `min_length` to `max_length` characters, both included.

    Args:
        max_length: longest text, in characters.
        min_length: shortest text; 0 admits `""`.
        charset: the only characters admitted, strings of length 1; None admits all that UTF-8 can encode.
        seed: of the generator that samples are drawn from.

    Samples are short (at most 64 characters more than `min_length`), not uniform. Raises InputError if a
    length is negative or the charset holds anything but single characters.
    """

    def __init__(
        self,
        max_length: int,
        *,
        min_length: int = 0,
        charset: Iterable[str] | None = None,
        seed: int | np.random.Generator | None = None,
    ):
        if not 0 <= min_length <= max_length:
            raise InputError(
                f"Text: 0 <= min_length <= max_length needed, got {min_length} and {max_length}."
            )
        self.min_length = int(min_length)
        self.max_length = int(max_length)
        self.charset = None if charset is None else frozenset(charset)
        if self.charset is not None:
            bad = sorted(
                repr(c) for c in self.charset if not (isinstance(c, str) and len(c) == 1 and _is_valid(c))
            )
            if bad:
                raise InputError(f"Text: charset must hold single characters, got {', '.join(bad)}.")
            if not self.charset and max_length > 0:
                raise InputError("Text: an empty charset admits only the empty text; set max_length=0.")
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A short random text. Masks and probabilities are not supported: InputError."""
        if mask is not None or probability is not None:
            raise InputError("Text.sample takes neither mask nor probability.")
        alphabet = _SAMPLED if self.charset is None else "".join(sorted(self.charset))
        longest = min(self.max_length, self.min_length + _SAMPLED_LENGTH)
        length = int(self.np_random.integers(self.min_length, longest + 1))
        return (
            "".join(alphabet[i] for i in self.np_random.integers(len(alphabet), size=length))
            if length
            else ""
        )

    def contains(self, x: Any) -> bool:
        if not isinstance(x, str) or not self.min_length <= len(x) <= self.max_length:
            return False
        return _is_valid(x) if self.charset is None else self.charset.issuperset(x)

    def to_jsonable(self, sample_n: Any) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        return list(sample_n)

    def __repr__(self) -> str:
        charset = "" if self.charset is None else f", charset={''.join(sorted(self.charset))!r}"
        return f"Text({self.max_length}, min_length={self.min_length}{charset})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Text)
            and (self.min_length, self.max_length) == (other.min_length, other.max_length)
            and self.charset == other.charset
        )

    def __hash__(self) -> int:
        return hash((self.min_length, self.max_length, self.charset))


@shared_memory.create_shared_memory.register(Text)
def _refuse_shared_memory(space: Text, n: int = 1, ctx: Any = None):
    raise InputError(
        "A text observation has no fixed size, so it can't live in shared memory: "
        "pass shared_memory=False to AsyncVectorEnv, or vector_kwargs={'shared_memory': False} to make_vec."
    )
