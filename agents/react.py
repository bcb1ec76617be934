"""The ReAct agent: a thought, then an action, both as text (Yao et al. 2022, arXiv:2210.03629).

Deviations: 1. one thought and one action per reply and no stop sequence: the reply ends by itself, and its
end is trained; 2. the *last* `Action:` line counts, so that a thought may mention actions; 3. there is no
few-shot example unless the goal text brings one.
"""

import re

from metagym.agents.prompts import first_action, first_then
from metagym.episode import Agent
from metagym.errors import FormatError

FORMAT = (
    "Think in a sentence, then act. Reply in two lines:\nThought: what you make of it\nAction: one action"
)

_ACTION = re.compile(r"^[ \t>*_#-]*action[ \t*_]*:[*_]*(.*)$", re.IGNORECASE | re.MULTILINE)


def react(
    goal: str = "",
    *,
    system: str | None = None,
    format: str = FORMAT,
    list_actions: bool = False,
    prefix: str = "",
    history: bool = True,
    max_format_errors: int = 3,
) -> Agent:
    """An agent that thinks in its reply and then names an action after `Action:`.

    Args:
        goal: what the task is about; goes before the first observation (before each one without history).
        system: system prompt.
        format: says how to reply; "" leaves it out.
        list_actions: whether to add the actions that the world says are possible (`info["admissible"]`).
        prefix: a begun reply, such as "Thought:", or "Action:" for an agent that does not think.
        history, max_format_errors: see `Agent`.
    """
    return Agent(
        system=system,
        prompt=first_then(goal, format, history=history, actions=list_actions),
        parse=parse,
        prefix=prefix,
        history=history,
        max_format_errors=max_format_errors,
    )


def parse(reply: str) -> str:
    """The text after the last `Action:` that begins a line, in any case and with or without Markdown.

    If that line ends there, the next line that is not blank is the action. Raises FormatError if none is.
    """
    found = list(_ACTION.finditer(reply))
    if not found:
        raise FormatError(
            'Your reply had no line that begins with "Action:". End it with: Action: one action'
        )
    last = found[-1]
    action = first_action((last.group(1), *reply[last.end() :].splitlines()))
    if action is None:
        raise FormatError('There was nothing after "Action:". Name one action there.')
    return action
