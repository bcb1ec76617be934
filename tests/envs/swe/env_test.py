"""`metagym/SWE-v0`: the rules of text envs, the tools, how an episode ends."""

import gymnasium as gym
import pytest

import metagym.envs.swe.env as env_module
from metagym.agents.swe import filled, parse, swe
from metagym.envs.swe import tools
from metagym.envs.swe.bubblewrap import BubblewrapFactory
from metagym.episode import run
from metagym.errors import FormatError, InputError, SandboxError, UnknownNameError
from metagym.testing import ScriptedGrader, ScriptedSandbox, check_text_env
from metagym.types import StopReason, Verdict


@pytest.fixture(scope="module", autouse=True)
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("swe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METAGYM_CACHE", str(root / "cache"))
        patch.setenv("METAGYM_STATE", str(root / "state"))
        patch.setattr(env_module, "_shared", {})
        yield
        for factory in env_module._shared.values():
            factory.close()


def make(**kwargs):
    return gym.make("metagym/SWE-v0", **kwargs)


def failed(patch: bytes) -> Verdict:
    return Verdict("failed", "as asked")


def judge(verdict: str):
    return ScriptedGrader(lambda patch: Verdict(verdict, "as asked"))


def test_the_rules_of_text_envs():
    check_text_env(
        lambda: make(grader=ScriptedGrader(failed), max_turns=4), tasks=2, steps=4, vector=False, context=None
    )


def test_an_episode_with_real_grading():
    env = make()
    observation, info = env.reset(seed=0, options={"task": "add-3"})
    assert "should be 31, it is 17" in observation
    assert info["repo"] == "add"
    observation, *_, info = env.step("shell ls calc; cat calc/add.py")
    assert observation.startswith("__init__.py\nadd.py\ndef add(")
    env.step("shell sed -i '2s/ [-+*] / + /' calc/add.py; git commit -qam fixed")
    observation, reward, terminated, truncated, info = env.step("submit")
    assert (observation, reward, terminated, truncated) == ("Submitted.", 1.0, True, False)
    assert (info["success"], info["stop"], info["verdict"].outcome) == (True, "submitted", "resolved")
    assert info["patch"].count(b"\n+ ") == 1
    env.close()


def test_what_an_agent_is_told():
    env = make(grader=judge("failed"), max_turns=30)
    env.reset(seed=0, options={"task": "mul-1"})

    def say(action):
        return env.step(action)[0]

    assert say("create a/b.txt\none\ntwo\nthree") == "Written: a/b.txt"
    assert say("view a/b.txt") == "a/b.txt, lines 1 to 3 of 3:\n     1  one\n     2  two\n     3  three"
    assert say("edit a/b.txt 2-2\nTWO\n2").startswith(
        "Changed. a/b.txt, lines 1 to 4 of 4:\n     1  one\n     2  TWO"
    )
    assert say("edit a/b.txt\n<<<<<<<\nTWO\n2\n=======\nzwei\n>>>>>>>").startswith("Changed.")
    assert "does not occur in a/b.txt" in say("edit a/b.txt\n<<<<<<<\nnine\n=======\nx\n>>>>>>>")
    assert "occurs 4 times" in say("edit a/b.txt\n<<<<<<<\ne\n=======\nx\n>>>>>>>")
    assert "has 3 lines, not 4 to 5" in say("edit a/b.txt 4-5\nx")
    assert say(
        "shell cat a/b.txt; printf 'x\\r\\ny\\r\\n' >w; seq 300 >long; exit_code() { return 3; }; exit_code"
    ) == ("one\nzwei\nthree\n[exit code 3]")
    say("edit w\n<<<<<<<\nx\ny\n=======\nz\n>>>>>>>")
    assert say("shell od -c w | head -1").split()[1:] == ["z", "\\r", "\\n"]
    assert "lines 1 to 100 of 300" in say("view long")
    assert "lines 96 to 195 of 300" in say("scroll down")
    assert "lines 1 to 100 of 300" in say("scroll up")
    assert "lines 250 to 260 of 300" in say("view long 250 260")
    assert say("view a") == "b.txt\n"
    assert say("view nothing").startswith("no such file")
    assert say('search "zwei"').strip() == "./a/b.txt:2:zwei"
    assert say("search nowhere in a") == "No line contains it."
    assert say("find b.tx") == "a/b.txt"
    assert say("shell true") == "[no output]"
    assert "There is no tool" in say("please fix it")
    *_, info = env.step("shell curl x; git log --all")
    assert info["metrics"] == {"commands": 22.0, "format_errors": 1.0, "hack_commands": 1.0, "timeouts": 0.0}
    env.close()


@pytest.mark.parametrize(
    "action",
    [
        *("", "shell", "shell  \n ", "view", "view a b", "view a 1 2 3", "scroll", "scroll left", "search"),
        *('search ""', "find", "create", "edit", "edit a", "edit a x-y\nz", "Shell ls", "ls"),
        "edit a\n<<<<<<<\n=======\nx\n>>>>>>>",
    ],
)
def test_format_errors_say_how(action):
    with pytest.raises(FormatError, match=r"shell|view|scroll|search|find|create|edit"):
        tools.parse(action)


def test_parsing():
    assert tools.parse("shell a\nb") == tools.Command("shell", text="a\nb")
    assert tools.parse('view "a b.py" 3') == tools.Command("view", path="a b.py", first=3)
    assert tools.parse("search x in y in src") == tools.Command("search", text="x in y", path="src")
    assert tools.parse("edit a 3\n") == tools.Command("edit", path="a", first=3, last=3, text="")
    edit = tools.parse("edit a\n<<<<<<< SEARCH\n  x\n\n=======\n>>>>>>> REPLACE")
    assert (edit.old, edit.text) == ("  x\n", "")
    assert tools.parse("\nsubmit please") == tools.Command("submit")


def test_how_it_ends(bubblewrap):
    def last(verdict, *actions, **kwargs):
        env = make(sandbox=bubblewrap, grader=judge(verdict), **kwargs)
        env.reset(seed=0, options={"task": "add-1"})
        for action in actions:
            result = env.step(action)
        return result

    *_, reward, terminated, truncated, info = last("hacked", "submit")
    assert (reward, terminated, truncated, info["stop"]) == (0.0, True, False, StopReason.HACKED)
    *_, reward, terminated, truncated, info = last("resolved", "shell :", "shell :", max_turns=2)
    assert (reward, terminated, truncated, info["stop"]) == (1.0, False, True, StopReason.TURN_LIMIT)
    *_, reward, terminated, truncated, info = last("resolved", "shell :", max_turns=1, grade_at_limit=False)
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)
    *_, terminated, truncated, info = last("resolved", "shell head -c 3G /dev/zero >big")
    assert (terminated, info["stop"], info["success"]) == (True, StopReason.RESOURCE_LIMIT, False)
    observation, *_, info = last("failed", "shell echo a; sleep 9", command_timeout_s=0.3)
    assert observation.startswith("a\n[no end within 0.3 s")
    assert info["metrics"]["timeouts"] == 1


def test_whose_fault_it_is(bubblewrap, tmp_path):
    """Infra is never the agent's: the episode loop tells which it was."""
    agent = swe()

    def chat(messages):
        return "Done.\n```\nsubmit\n```"

    def stop(**kwargs):
        return run(make(**kwargs), chat, "add-1", seed=0, agent=agent).stop

    assert stop(sandbox=bubblewrap, grader=judge("failed")) == StopReason.SUBMITTED
    assert stop(sandbox=bubblewrap, grader=judge("hacked")) == StopReason.HACKED
    assert stop(sandbox=bubblewrap, grader=judge("infra")) == StopReason.INVALID_REWARD

    class Broken(BubblewrapFactory):
        def start(self, *args, **kwargs):
            raise SandboxError("the daemon is gone")

    assert stop(sandbox=Broken(ledger=tmp_path / "b")) == StopReason.INFRA
    env = make(sandbox=bubblewrap, grader=judge("failed"))
    killed = []

    def kill(messages):
        killed.append(env.unwrapped.sandbox.close())
        return "```\nshell ls\n```"

    trajectory = run(env, kill, "add-1", seed=0, agent=agent)
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.INFRA, 1)


def test_wrong_arguments():
    with pytest.raises(UnknownNameError, match="sandbox 'dockr'"):
        make(sandbox="dockr")
    with pytest.raises(InputError, match="no file or folder"):
        make(data="nowhere.jsonl")
    with pytest.raises(InputError, match="command_timeout_s"):
        make(command_timeout_s=0)


def test_the_agent():
    assert parse("I look.\n```\nshell ls\n```") == "shell ls"
    assert parse("```bash\nedit a 1-2\n  x\n```\nok") == "edit a 1-2\n  x"
    for reply in ("no block", "```\nshell ls\n```\n```\nsubmit\n```", "```\n\n```", "```\nshell ls"):
        with pytest.raises(FormatError, match="one command in a block"):
            parse(reply)
    agent = swe("Goal", action="shell sed -i 's/-/{reply}/' a.py", format="")
    assert agent.parse(" + ") == "shell sed -i 's/-/+/' a.py"
    assert agent.prompt("Issue", {}, 0) == "Goal\n\nIssue"
    assert agent.prompt("Answer", {}, 1) == "Answer"
    for reply in ("", "a b", "'; rm x", "$HOME"):
        with pytest.raises(FormatError):
            filled("x {reply}", reply)


def test_tools_pass_on_a_broken_sandbox():
    sandbox = ScriptedSandbox(lambda command: SandboxError("gone"))
    acting = tools.Tools(sandbox, "/testbed", timeout_s=1.0, max_chars=1000)
    with pytest.raises(SandboxError):
        acting.run(tools.parse("shell ls"))
    sandbox = ScriptedSandbox(lambda command: "x" * 5000)
    acting = tools.Tools(sandbox, "/testbed", timeout_s=1.0, max_chars=1000)
    assert "[... 4000 characters left out ...]" in acting.run(tools.parse("shell ls")).output
