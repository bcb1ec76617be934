"""Terminus-2, of harbor: chat completions without tools; JSON replies with keys for a terminal (tmux)."""

from metagym.agents.external import Harness, Start, words

SCRIPT = """import asyncio, os, shutil, sys
from pathlib import Path
from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext


class Here:
    session_id, default_user = "here", None

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None, **more):
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", command, cwd=cwd or os.getcwd(), stdout=pipe, stderr=pipe,
            stdin=asyncio.subprocess.DEVNULL)
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec or 60)
        except asyncio.TimeoutError:
            process.kill()
            return ExecResult(stdout="", stderr="timeout", return_code=124)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)

    async def upload_file(self, source, target):
        shutil.copy(source, target)

    async def download_file(self, source, target):
        if os.path.exists(source):
            shutil.copy(source, target)


async def main(task, context, turns):
    logs = Path(os.environ["HOME"]) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    info = {"max_input_tokens": context, "max_output_tokens": context // 4}
    info |= {"input_cost_per_token": 0, "output_cost_per_token": 0}
    agent = Terminus2(
        logs_dir=logs, model_name=os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"],
        parser_name="json", record_terminal_session=False, max_turns=turns, model_info=info)
    await agent.setup(Here())
    await agent.run(task, Here(), AgentContext())


asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


def command(start: Start) -> str:
    numbers = (str(start.context), str(start.max_turns))
    return words(f"{start.bin}/bin/python", f"{start.home}/terminus_run.py", start.task, *numbers)


def env(start: Start) -> dict[str, str]:
    return {
        "OPENAI_API_KEY": start.key,
        "OPENAI_BASE_URL": f"{start.url}/v1",
        "MODEL": f"openai/{start.model}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "TMUX_TMPDIR": start.home,
    }


HARNESS = Harness(
    "terminus-2",
    ("harbor==0.25.0",),
    "pip",
    command,
    env,
    lambda start: {"terminus_run.py": SCRIPT},
    program="bin/python",
    python=(3, 12),
)
