"""The pipeline on ALFWorld (games made here) and MiniHack with SmolLM2 as actor and reflector: collect, one
step of training on groups of unequal outcomes, changed weights, a measured run. A test of the machinery."""

import json

import pytest

from metagym import cli
from metagym.rl.metrics import read_jsonl

CONFIG = """
from metagym.experiments.config import base, ict_evaluation

def get_config():
    c = base()
    c.steps = 1
    c.model.name = "smollm2-135m"
    c.model.chat_template = "plain"
    c.model.memory = 0.1
    c.ict.world, c.ict.world_kwargs, c.ict.split = WORLD, KWARGS, SPLIT
    c.ict.types, c.ict.held_out = TYPES[:1], TYPES[1:]
    c.ict.k, c.ict.meta_turns, c.ict.collect = 2, 1, "random_action"
    c.ict.transcript = {"head": "", "episode": "", "turn": "{observation} Action: {action}", "max_chars": 400}
    c.ict.valid_weight = WEIGHT
    c.actor.kind = "engine"
    c.actor.chat_template = "plain"
    c.actor.max_tokens, c.actor.context, c.actor.slots, c.actor.max_turns = 4, 256, 4, 2
    c.actor.stop = ("\\n",)
    c.actor.agent.history = False
    c.actor.agent.kind = AGENT
    c.actor.agent.template = TEMPLATE
    c.actor.agent.prefix = PREFIX
    c.actor.agent.args = {"max_format_errors": 9}
    c.world.id, c.world.split = "metagym/Reflect-v0", SPLIT
    c.world.kwargs.held_out, c.world.kwargs.data = TYPES[1:], ""
    c.agent.kind, c.agent.history = "reflector", False
    c.agent.template = "{observation}\\nAdvice:"
    c.sampling.max_tokens, c.sampling.context = 6, 256
    c.groups_per_step, c.group_size, c.max_workers = 1, 4, 4
    c.batch.rows, c.batch.length, c.batch.share_prompts = 1, 256, True
    c.engine.slots = 4
    c.mesh.fsdp = 1
    row = {"types": TYPES[1:], "split": SPLIT, "k": (1,), "meta_turns": 1, "reflectors": ("trained",)}
    c.ict.evaluate.held_out = ict_evaluation(**row)
    return c
"""
WORLDS = {
    "alfworld": {
        "WORLD": "metagym/ALFWorld-v0",
        "KWARGS": {},
        "SPLIT": "generated",
        "TYPES": ("look_at_obj_in_light", "pick_and_place_simple"),
        "WEIGHT": 0.5,  # such a small model never gets a household task done: what varies is whether it acts
        "AGENT": "json_action",
        "TEMPLATE": '{observation}\nAnswer: {"action": "look"}\nAnswer:',
        "PREFIX": ' {"action": "',
    },
    "minihack": {
        "WORLD": "metagym/MiniHack-v0",
        "KWARGS": {
            "observation": "compact",
            "actions": ("north", "south", "east", "west"),
            "reward": "sparse",
            "max_turns": 2,
        },
        "SPLIT": "train",
        "TYPES": ("MiniHack-Room-Random-5x5-v0", "MiniHack-Room-Random-15x15-v0"),
        "WEIGHT": 0.5,
        "AGENT": "json_action",
        "TEMPLATE": '{observation}\nAnswer: {"action": "west"}\nAnswer:',
        "PREFIX": ' {"action": "',
    },
}


@pytest.mark.parametrize("name", WORLDS)
def test_end_to_end(name, tmp_path):
    file = tmp_path / "config.py"
    file.write_text("\n".join(f"{k} = {v!r}" for k, v in WORLDS[name].items()) + CONFIG)
    data, run = tmp_path / "tuples.jsonl", tmp_path / "run"
    common = [f"--config={file}", f"--config.world.kwargs.data={data}"]
    assert cli.main(["ict", "collect", f"--config={file}", f"--out={data}"]) == 0
    (tuple_,) = read_jsonl(data)
    assert tuple_["actor"][0]["model"] == "smollm2-135m"
    assert cli.main(["train", *common, f"--workdir={run}"]) == 0
    episodes = [r for f in (run / "episodes").glob("0*.jsonl") for r in read_jsonl(f)]
    assert len({r["outcome"] for r in episodes}) > 1
    (metrics,) = [r for r in read_jsonl(run / "metrics.jsonl") if "update/applied" in r]
    assert metrics["update/applied"] == 1.0
    assert metrics["update/grad_norm"] > 0
    assert metrics["version"] == 1.0  # of the weights: an update was made and served
    assert cli.main(["ict", "eval", *common, f"--workdir={run}"]) == 0
    (measured,) = read_jsonl(run / "ict" / "runs.jsonl")
    assert measured["about"]["step"] == 1
    assert measured["type"] == WORLDS[name]["TYPES"][1]
    assert [len(t["episodes"]) for t in measured["turns"]] == [1, 1]
    json.loads((run / "ict" / "results.json").read_text())
