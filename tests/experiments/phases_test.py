"""Phases of a run: what a config makes of them, and that a run over several is one, broken off or not."""

import json
import shutil

import gymnasium as gym
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from metagym import cli
from metagym.errors import InputError
from metagym.experiments import build
from metagym.experiments import config as config_lib
from metagym.rl.metrics import equal_records, read_jsonl
from metagym.text_env import NumberedTasks, TextEnv
from metagym.types import StopReason, Task

ID = "metagym-test/Even-v0"


class Even(TextEnv):
    """A reply whose bytes have an even sum ends an episode well; others cost a turn. Type b: never solved."""

    def __init__(self, *, split="train", types=None, tasks=None, render_mode=None):
        table = NumberedTasks(("a", "b"), {"train": range(3), "test": range(3, 9)})
        super().__init__(table, split=split, types=types, tasks=tasks, max_turns=3, render_mode=render_mode)

    def _begin(self, task, seed, rng, options):
        self._hopeless = task.type == "b"
        return f"Say {task.id}.", {"admissible": []}

    def _act(self, action):
        won = not self._hopeless and sum(action.encode()) % 2 == 0
        return "No." if not won else "Yes.", float(won), won, False, {"success": won}


if ID not in gym.registry:
    gym.register(ID, entry_point=Even, disable_env_checker=True, order_enforce=False)

CONFIG = f'''
from metagym.experiments.config import base, evaluation, phase

def get_config():
    config = base()
    config.steps = 6
    config.model.name = "random"
    config.model.chat_template = "plain"
    config.model.chunk = 64
    config.world.id = "{ID}"
    config.agent.template = "{{observation}}\\nAction:"
    config.agent.max_turns = 1
    config.sampling.max_tokens = 2
    config.sampling.context = 32
    config.groups_per_step = 3
    config.group_size = 4
    config.max_workers = 6
    config.mesh.fsdp = 1
    config.batch.rows = 2
    config.batch.length = 96
    config.batch.minibatches = 2
    config.engine.slots = 6
    config.engine.deterministic = True
    config.checkpoint_every = 1
    config.checkpoints_kept = 9
    config.algorithm.name = "rft"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 2
    config.phases.dapo = phase(
        after=2,
        algorithm__name="dapo",
        algorithm__args={{"clip_high": 0.3, "drop_equal": False, "entropy_coef": 0.01}},
        penalties={{"length": {{"threshold": 1, "maximum": 4}}}},
        optimizer__warmup_steps=0,
        batch__minibatches=1,
    )
    config.phases.long = phase(
        after=4, agent__max_turns=3, sampling__context=96, curriculum={{"at_least": 1, "at_most": 1.0}}
    )
    config.evaluate.test = evaluation(types=("a",), episodes=3)
    return config
'''


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("programs")))
    jax.config.update(names[1], 0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "recipe.py"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def run(file, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    assert cli.main(["train", f"--config={file}", f"--workdir={workdir}"]) == 0
    return workdir


def steps(workdir):
    return [r for r in read_jsonl(workdir / "metrics.jsonl") if "reward/mean" in r]


def episodes(workdir):
    files = sorted((workdir / "episodes").glob("0*.jsonl"))
    return [(int(f.stem), r) for f in files for r in read_jsonl(f)]


def arrays(workdir, step):
    """The bytes of all arrays of a checkpoint."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = checkpointer.restore((workdir / "checkpoints" / f"{step:08d}" / "arrays").absolute())
    return {name: np.asarray(x).tobytes() for name, x in found.items()}


def test_a_run_over_phases(run):
    lines = steps(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines[:2]:  # rejection fine-tuning: failures are left out, the rest is trained
        assert line["batch/rejected"] + 0.0 == round(12 * (1 - line["outcome/mean"]))
        assert line["update/applied"] >= 1
    assert all("batch/rejected" not in line or line["batch/rejected"] == 0 for line in lines[2:])
    played = episodes(run)
    assert max(len(r["turns"]) for step, r in played if step <= 4) == 1
    assert max(len(r["turns"]) for step, r in played if step > 4) == 3
    for step, r in played:  # the penalty is DAPO's: 0 for one turn, -1/3 and -2/3 for more
        penalty = 0 if step <= 2 else -(len(r["turns"]) - 1) / 3
        assert r["reward"] == pytest.approx(r["outcome"] + penalty)
    solved = {r["task"] for step, r in played if step <= 4 and r["outcome"] > 0.5}
    tried = {r["task"] for step, r in played if step <= 4}
    assert any(t.startswith("b") for t in tried)
    left = {r["task"] for step, r in played if step > 4}
    assert left <= solved  # all tasks were tried in the four steps before
    evaluations = [r for r in read_jsonl(run / "metrics.jsonl") if "eval/test" in r]
    assert [r["step"] for r in evaluations] == [0, 6]
    turns = [len(r["turns"]) for f in (run / "episodes").glob("eval-*.jsonl") for r in read_jsonl(f)]
    assert max(turns) > 1  # before and after are measured with the last limits


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("stops", [(1, 3), (2, 4, 5)], ids=["within", "between"])
def test_a_run_that_was_broken_off_is_the_unbroken_one(run, file, tmp_path, stops):
    """Within a phase and exactly between two. What came after a checkpoint is gone, as after a kill."""
    workdir = tmp_path / "run"
    shutil.copytree(run, workdir)
    for stop in stops:
        for path in (workdir / "checkpoints").iterdir():
            if int(path.name) > stop:
                shutil.rmtree(path)
        limit = f"--config.steps={6}"
        assert cli.main(["train", f"--config={file}", f"--workdir={workdir}", "--resume", limit]) == 0
        assert equal_records(steps(run), steps(workdir))
        for step in (stop + 1, 6):
            assert arrays(run, step) == arrays(workdir, step)
        here, there = (sorted((s, r["id"], r["reward"]) for s, r in episodes(w)) for w in (run, workdir))
        assert here == there


def test_phases_follow_each_other(file):
    found = config_lib.phases(config_lib.load(str(file)))
    assert [(p.name, p.first, p.last) for p in found] == [("", 0, 2), ("dapo", 2, 4), ("long", 4, 6)]
    assert [p.config.algorithm.name for p in found] == ["rft", "dapo", "dapo"]
    assert [p.config.agent.max_turns for p in found] == [1, 1, 3]
    assert found[2].config.algorithm.args.clip_high == 0.3  # the change before it stays
    assert build.engine_context(found[0].config) == 96
    short = config_lib.load(str(file))
    short.steps = 3
    assert [(p.first, p.last) for p in config_lib.phases(short)] == [(0, 2), (2, 3)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"after": 1, "model__name": "x"}, "unknown field that phase 'p' may change 'model'"),
        ({"after": 1, "agent__max_turnz": 3}, "phase 'p': .*max_turnz"),
        ({"after": 1, "agent__max_turns": "many"}, "phase 'p': .*max_turns|phase 'p': .*many"),
        (
            {"after": 1, "sampling__max_tokens": 0},
            "phase 'p': config field 'sampling.max_tokens' must be pos",
        ),
        ({"after": 0}, "begin after different steps, the first after 1 or later"),
        ({"after": 4, "agent__max_turns": 3}, "begin after different steps"),
    ],
)
def test_a_wrong_phase_is_explained(file, changes, message):
    config = config_lib.load(str(file))
    config.phases.p = config_lib.phase(**changes)
    with pytest.raises(InputError, match=message):
        config_lib.check(config)


def test_a_phase_made_by_hand_is_refused(file):
    config = config_lib.load(str(file))
    config.phases.p = {"after": 3}
    with pytest.raises(InputError, match="made by phase"):
        config_lib.check(config)


def test_the_curriculum_reads_the_records(tmp_path):
    config = config_lib.base()
    config.curriculum = {"at_least": 1, "at_most": 2 / 3}
    tasks = [Task(f"t{i}", "t", "train") for i in range(5)]
    played = {"t0": [0, 0, 0], "t1": [1, 0, 0], "t2": [1, 1, 0], "t3": [1, 1, 1]}
    lines = [(t, x, StopReason.TERMINATED) for t, outcomes in played.items() for x in outcomes]
    lines.append(("t1", 1.0, StopReason.INFRA))  # nobody's doing: not counted
    for step, some in ((1, lines[:6]), (2, lines[6:]), (3, [("t0", 1.0, StopReason.TERMINATED)])):
        text = "".join(json.dumps({"task": t, "outcome": x, "stop": s}) + "\n" for t, x, s in some)
        (tmp_path / f"{step:06d}.jsonl").write_text(text)
    (tmp_path / "eval-000001.jsonl").write_text(json.dumps({"task": "t3", "outcome": 0, "stop": "submitted"}))

    def left(after):
        return [t.id for t in build.build_tasks(config, tasks, tmp_path, after).tasks]

    assert left(2) == ["t1", "t2", "t4"]  # never, always: out; t4 was not tried
    assert left(0) == ["t0", "t1", "t2", "t3", "t4"]
    assert left(3) == ["t0", "t1", "t2", "t4"]
    with pytest.raises(InputError, match="leaves none of 1 tasks"):
        build.build_tasks(config, tasks[3:4], tmp_path, 2)
