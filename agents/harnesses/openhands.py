"""OpenHands, by its SDK: chat completions; a terminal, a file editor, and a tool that says it is done."""

from metagym.agents.external import Harness, Start, words

SCRIPT = """import os, sys
from pydantic import SecretStr
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
key = SecretStr(os.environ["LLM_API_KEY"])
llm = LLM(usage_id="agent", model=os.environ["LLM_MODEL"], base_url=os.environ["LLM_BASE_URL"], api_key=key)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
talk = Conversation(agent=agent, workspace=os.getcwd(), max_iteration_per_run=int(sys.argv[2]))
talk.send_message(sys.argv[1])
talk.run()
"""


def command(start: Start) -> str:
    script = f"{start.home}/openhands_run.py"
    return words(f"{start.bin}/bin/python", script, start.task, str(start.max_turns))


def env(start: Start) -> dict[str, str]:
    return {
        "LLM_API_KEY": start.key,
        "LLM_BASE_URL": f"{start.url}/v1",
        "LLM_MODEL": f"openai/{start.model}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENHANDS_SUPPRESS_BANNER": "1",
    }


HARNESS = Harness(
    "openhands",
    ("openhands-sdk==1.58.2", "openhands-tools==1.58.2"),
    "pip",
    command,
    env,
    lambda start: {"openhands_run.py": SCRIPT},
    program="bin/python",
    python=(3, 12),
)
