"""The reflector: reads a transcript and writes what the actor is told next."""

from metagym.agents.prompts import first_then
from metagym.episode import Agent

FORMAT = (
    "Think about what the agent did right and wrong. Then write the system prompt that it gets for its next "
    "tasks between <prompt> and </prompt>; it sees nothing else of this."
)


def reflector(
    goal: str = "",
    *,
    system: str | None = None,
    format: str = FORMAT,
    prefix: str = "",
    one_line: bool = False,
    history: bool = False,
    max_format_errors: int = 1,
) -> Agent:
    """An agent for meta-environments: its observation is a transcript, its action a prompt for the actor.

    Args:
        goal: what the actor's tasks are about; goes before the transcript.
        system: the reflector's own system prompt.
        format: says how to reply; "" leaves it out. How a reply is read is the meta-environment's
            (`metagym.meta.Prompting.read`).
        prefix: a begun reply, which is no part of the prompt that it becomes.
        one_line: only the first line that is not blank counts.
        history: whether earlier meta-turns stay in the conversation; a transcript has the current prompt in
            it, so a reflector can do without, as in training, where every meta-turn is alone.
        max_format_errors: see `Agent`; no reply is refused.
    """
    return Agent(
        system=system,
        prompt=first_then(goal, format, history=history, actions=False),
        parse=lambda reply: parse(reply.removeprefix(prefix), one_line=one_line),
        prefix=prefix,
        history=history,
        max_format_errors=max_format_errors,
    )


def parse(reply: str, *, one_line: bool = False) -> str:
    """The reply without blanks around it, or its first line that has anything in it; "" if there is none."""
    if not one_line:
        return reply.strip()
    return next((line.strip() for line in reply.splitlines() if line.strip()), "")
