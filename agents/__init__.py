"""Who drives an episode: prompts and the parsing of replies."""

from metagym.agents.json_action import json_action
from metagym.agents.plain import plain
from metagym.agents.react import react
from metagym.agents.reflector import reflector
from metagym.agents.swe import swe

__all__ = ["json_action", "plain", "react", "reflector", "swe"]
