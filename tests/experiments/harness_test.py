"""Training and evaluation through foreign harnesses, with one that is a few lines and a tiny random model."""

import itertools
import json

import pytest

from metagym import cli
from metagym.agents import harnesses
from metagym.agents.external import Harness, words
from metagym.errors import InputError
from metagym.experiments import config as config_lib
from metagym.experiments import harness as harness_lib
from metagym.experiments import results, train
from metagym.types import TokenTrace, Why

# Asks once with a tool, runs the call that it gets, and asks for a title at its end.
PROGRAM = """import json, os, subprocess, sys, urllib.request
def ask(talk, tools):
    body = json.dumps({"messages": talk, "tools": tools}).encode()
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body)
    request.add_header("authorization", "Bearer " + os.environ["KEY"])
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
schema = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "bash", "parameters": schema}}]
said = ask([{"role": "user", "content": sys.argv[1]}], tools)
if sys.argv[2] == "crash":
    os.kill(os.getpid(), 11)
for call in said.get("tool_calls") or []:
    subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True)
if sys.argv[2] == "title":
    ask([{"role": "user", "content": "A title."}], [])
print("worked")
"""
TRAINED = """
from metagym.experiments.config import base, evaluation

CALL = '<tool_call>\\n{"name": "bash", "arguments": {"command": "case \\''
REST = "\\' in [!-~]) sed -i \\'2s/ [-+*] / + /\\' calc/add.py;; esac\\"}}\\n</tool_call>"


def get_config():
    config = base()
    config.steps = 2
    config.model.name = "random"
    config.world.id = "metagym/SWE-v0"
    config.world.types = ("add",)
    config.world.kwargs.remember = True
    config.agent.kind = "harness"
    config.agent.args.name = "fake-plain"
    config.agent.args.suffix = REST
    config.agent.prefix = CALL
    config.agent.max_turns = 3
    config.sampling.max_tokens = 1
    config.sampling.context = 1024
    config.groups_per_step = 2
    config.group_size = 4
    config.max_workers = 4
    config.optimizer.learning_rate = 1e-3
    config.batch.rows = 8
    config.batch.length = 1024
    config.engine.slots = 4
    config.record_traces = True
"""
CONFIG = f"""{TRAINED}
    config.evaluate.held_out = evaluation(episodes=2)
    titled = {{"name": "fake-title", "suffix": REST}}
    config.evaluate.titled = evaluation(episodes=2, agent={{"args": titled}})
    config.evaluate.native = evaluation(
        episodes=2, agent={{"kind": "swe", "args": {{"action": "{{reply}}"}}, "prefix": "", "max_turns": 1}}
    )
    return config
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    (folder / "small.py").write_text(CONFIG)
    patch = pytest.MonkeyPatch()
    patch.setenv("METAGYM_HARNESSES", str(folder))
    for how in ("plain", "title"):
        fake = Harness(
            f"fake-{how}",
            ("fake==1",),
            "npm",
            lambda start, how=how: words("python3", f"{start.home}/program.py", start.task, how),
            lambda start: {"URL": start.url, "KEY": start.key},
            lambda start: {"program.py": PROGRAM},
        )
        fake.folder.mkdir()
        (fake.folder / ".installed").touch()
        patch.setitem(harnesses.HARNESSES, fake.name, fake)
    yield folder / "small.py"
    patch.undo()


def test_a_harness_that_crashes_is_played_again(config, monkeypatch):
    """Two of eight die of a signal after a reply: eight good episodes, and nothing of the two is trained."""
    started = itertools.count()
    flaky = Harness(
        "fake-flaky",
        ("fake==2",),
        "npm",
        lambda start: words("python3", f"{start.home}/program.py", start.task,
                            "crash" if next(started) in (2, 5) else "plain"),
        lambda start: {"URL": start.url, "KEY": start.key},
        lambda start: {"program.py": PROGRAM},
    )  # fmt: skip
    flaky.folder.mkdir()
    (flaky.folder / ".installed").touch()
    monkeypatch.setitem(harnesses.HARNESSES, flaky.name, flaky)
    plain = config.with_name("flaky.py")
    plain.write_text(TRAINED.replace("fake-plain", "fake-flaky") + "    return config\n")
    workdir = config.parent / "flaky"
    assert cli.main(["train", f"--config={plain}", f"--workdir={workdir}", "--config.steps=1"]) == 0
    played = lines(workdir / "episodes" / "000001.jsonl")
    assert sorted(e["stop"] for e in played) == ["infra"] * 2 + ["submitted"] * 8
    assert all("signal 11" in e["error"] for e in played if e["stop"] == "infra")
    good = [e["id"].partition(".")[0] for e in played if e["stop"] == "submitted"]
    assert len(set(good)) == 8, "no member of a group is there twice"
    (step,) = (line for line in lines(workdir / "metrics.jsonl") if "sampler/max" in line)
    assert step["tokens/sampled"] == 8


@pytest.fixture(scope="module")
def run(config):
    workdir = config.parent / "run"
    assert cli.main(["train", f"--config={config}", f"--workdir={workdir}"]) == 0
    return workdir


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_model_is_trained_through_a_harness(run):
    steps = [line for line in lines(run / "metrics.jsonl") if "sampler/max" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["sampler/max"] < 1e-3
        assert step["tokens/sampled"] == 8
        assert 0 < step["tokens/trained_share"] < 0.1
    assert any(0 < step["outcome/mean"] < 1 for step in steps)
    assert any(step["update/grad_norm"] > 0 for step in steps), "the outcomes of a group differ"


def test_an_episode_keeps_what_the_harness_did(run):
    first = lines(run / "episodes" / "000001.jsonl")[0]
    assert first["stop"] == "submitted"
    assert first["log"] == "worked"
    assert (len(first["turns"]), first["metrics"]["calls"]) == (1, 1)
    assert first["turns"][0]["observation"].startswith("add(")
    assert sum(t["reward"] for t in first["turns"]) == first["outcome"]
    (trace,) = first["traces"]
    assert trace["kind"] == "main"


def test_harnesses_side_by_side(config, run, capsys):
    assert cli.main(["eval", f"--config={config}", f"--workdir={run}"]) == 0
    table = capsys.readouterr().out
    assert "tokens of an episode" in table
    scores = results.read(run / "evaluation.json")[2]
    assert scores["held_out"].turns == 1
    assert scores["titled"].turns == 2
    assert scores["held_out"].tokens["trained, main"] == 2
    assert scores["titled"].tokens["trained, main"] == 2
    assert scores["titled"].tokens["excluded"] == 2, "titles"
    assert scores["native"].tokens["trained, main"] == 2
    for score in scores.values():
        assert score.tokens["rendered"] > 0
        assert score.episodes == 2


def test_what_can_not_work_is_told_before_anything_is_trained(config):
    def wrong(**changes):
        return config_lib.changed(config_lib.load(str(config)), **changes)

    with pytest.raises(InputError, match="which harness: mini-swe-agent"):
        harness_lib.player(wrong(agent__args={}))
    with pytest.raises(InputError, match=r"agent.template is for agents of ours"):
        harness_lib.player(wrong(agent__template="{observation}"))
    with pytest.raises(InputError, match=r"rollout.branches needs an agent of ours"):
        harness_lib.player(wrong(rollout__branches=1))
    with pytest.raises(InputError, match="fake-plain"):
        harness_lib.player(wrong(agent__args={"name": "fake-plan"}))
    missing = wrong(agent__args={"name": "openhands"})
    with pytest.raises(InputError, match="doctor --install-harness openhands"), train.parts(missing, config):
        pass
    toy = wrong(world__id="metagym/Toy-v0", world__kwargs={}, world__types=())
    with pytest.raises(InputError, match="Toy-v0"), train.parts(toy, config):
        pass


def test_the_sources_of_tokens():
    import numpy as np

    why = np.array([0, 0, 1, 2, 4, 5, 5, 3], np.int8)
    sampled = np.isin(why, (Why.SAMPLED, Why.SUPERSEDED, Why.EXCLUDED, Why.SHARED))
    trace = TokenTrace(
        np.arange(8, dtype=np.int32), sampled, why == Why.SAMPLED, np.where(sampled, -1, np.nan).astype("f4"),
        np.zeros(8, np.int32), np.zeros(8, np.int32), np.zeros((8, 0), np.int32), "sub-agent", why,
    )  # fmt: skip

    class Played:
        traces = (trace,)

    found = results.sources([Played()])  # type: ignore[list-item]
    once = dict.fromkeys(("trained, sub-agent", "rebuilt", "superseded", "shared"), 1)
    assert found == {"rendered": 2, "excluded": 2, **once}
