"""mini-swe-agent: one tool, bash; a first request of 3 kB. Ends with a command that prints its password."""

from metagym.agents.external import Harness, Start, words


def command(start: Start) -> str:
    limit = ("-c", "mini.yaml", "-c", f"agent.step_limit={start.max_turns}")
    mini = (f"{start.bin}/bin/python", f"{start.bin}/bin/mini")  # its first line names a path of this machine
    run = (*mini, "-y", "--exit-immediately", "-m", f"openai/{start.model}", *limit)
    return words(*run, "-t", start.task, "-o", f"{start.home}/trajectory.json")


def env(start: Start) -> dict[str, str]:
    return {
        "MSWEA_CONFIGURED": "1",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": start.home,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_API_KEY": start.key,
        "OPENAI_BASE_URL": f"{start.url}/v1",
    }


HARNESS = Harness(
    "mini-swe-agent",
    ("mini-swe-agent==2.4.6",),
    "pip",
    command,
    env,
    program="bin/mini",
    log="trajectory.json",
)
