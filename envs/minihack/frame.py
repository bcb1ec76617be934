"""What a game tells its environment. Apart from game.py, so that reading it imports no NetHack."""

from typing import NamedTuple


class Frame(NamedTuple):
    """What a reset or step gives. Plain data: it crosses a process boundary."""

    observation: str
    reward: float
    end: str | None  # None while it goes on; "success", "failure" or "death"
    action: str | None  # what was done, in canonical words; None: nothing
    admissible: list[str]
    message: str  # all that the game said, whatever the observation shows of it
    limit: int  # MiniHack's own step limit
