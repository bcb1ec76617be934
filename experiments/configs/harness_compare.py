"""One model in several harnesses, side by side: SmolLM2-135M on the built-in repairs.

The same tasks by our own agent and by three foreign programs with their own prompts and tools. The table has
success, calls of the model in an episode, and where each token came from: trained and in which kind of
branch, rendered, rebuilt, superseded, excluded. The model fills one place of a call that is always valid, as
in harness_small: what is compared is what each harness makes of the same weights.

Needs: metagym doctor --install-harness=mini-swe-agent --install-harness=terminus-2
--install-harness=openhands
Time: not measured. Expected: not measured.
Command: metagym eval --config=harness_compare; the training that it can measure, with --workdir:
make train CONFIG=experiments/configs/harness_compare.py
"""

import json

from metagym.experiments.config import evaluation
from metagym.experiments.configs import harness_small

SAID = "{said}"  # where in a call the model says one token
SED = f"sed -i '{SAID}!s/ [-+*] / + /' calc/add.py"
BEGUN = "The operator in line 2 is wrong.\n"
EPISODES = 6


def calls(*named):
    """Tool calls as text: what stands before the model's token, and what behind it."""
    texts = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in named
    ]
    return frame("\n".join(texts))


def frame(text):
    before, after = text.split(SAID)
    return BEGUN + before, after


FRAMES = {
    "mini-swe-agent": (harness_small.PREFIX, harness_small.SUFFIX),
    "openhands": calls(("terminal", {"command": SED}), ("finish", {"message": "Done."})),
    "terminus-2": frame(
        json.dumps(
            {
                "analysis": "The operator in line 2 is wrong.",
                "plan": "Replace it.",
                "commands": [{"keystrokes": f"{SED}\n", "duration": 0.5}],
                "task_complete": True,
            }
        )
    ),
}


def get_config():
    config = harness_small.get_config()
    config.sampling.context = 8192
    config.engine.num_pages = 1600
    native = {
        "kind": "swe",
        "args": {
            "action": f"shell {SED.replace(SAID, '{reply}')}",
            "format": f"{BEGUN}The line to leave alone is",
        },
        "prefix": "",
        "history": False,
        "max_turns": 1,
    }
    config.evaluate = {"native": evaluation(episodes=EPISODES, agent=native)}
    for name, (prefix, suffix) in FRAMES.items():
        agent = {"args": {"name": name, "suffix": suffix, "timeout_s": 300.0}, "prefix": prefix}
        config.evaluate[name] = evaluation(episodes=EPISODES, agent=agent)
    return config
