"""The plain agent: the reply is the action."""

from metagym.agents.prompts import first_action, first_then
from metagym.episode import Agent
from metagym.errors import FormatError

FORMAT = "Reply with one action and nothing else."


def plain(
    goal: str = "",
    *,
    system: str | None = None,
    format: str = FORMAT,
    list_actions: bool = False,
    prefix: str = "",
    history: bool = True,
    max_format_errors: int = 3,
) -> Agent:
    """An agent whose reply is the action: its first line that is not blank, without quotes.

    Args:
        goal: what the task is about; goes before the first observation (before each one without history).
        system: system prompt.
        format: says how to reply; "" leaves it out.
        list_actions: whether to add the actions that the world says are possible (`info["admissible"]`).
        prefix: a begun reply; the action is what follows it.
        history, max_format_errors: see `Agent`.
    """
    return Agent(
        system=system,
        prompt=first_then(goal, format, history=history, actions=list_actions),
        parse=lambda reply: parse(reply.removeprefix(prefix)),
        prefix=prefix,
        history=history,
        max_format_errors=max_format_errors,
    )


def parse(reply: str) -> str:
    """The first line with anything in it, without quotes around it. Raises FormatError if there is none."""
    action = first_action(reply.splitlines())
    if action is None:
        raise FormatError(f"There was no action in your reply. {FORMAT}")
    return action
