"""The whole loop with a tiny random model: what a run leaves behind, going on with it, measuring it; and what
is said, before anything is trained, to a config that can't work."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import gymnasium
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from metagym import cli
from metagym.agents.swe import swe
from metagym.episode import run as play
from metagym.experiments import build, results
from metagym.experiments import config as config_lib
from metagym.experiments import train as train_lib


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """The runs of this module are of the same programs."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs")),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of the debug config. Tests that change it copy it."""
    workdir = tmp_path_factory.mktemp("runs") / "debug"
    assert cli.main(["train", "--config=debug", f"--workdir={workdir}"]) == 0
    return workdir


@pytest.fixture
def copy(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def metrics(workdir):
    """The records of training steps."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if not any(name.startswith("eval/") for name in r)]


def episodes(workdir, files="0*.jsonl"):
    """The records of the episodes of training; of evaluations with "eval-*.jsonl"."""
    files = sorted((workdir / "episodes").glob(files))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_run_leaves_everything_behind(run):
    assert json.loads((run / "config.json").read_text())["model"]["name"] == "random"
    lines = metrics(run)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["update/applied"] == 1 and math.isfinite(line["loss"]) for line in lines)
    assert all(line["sampler/max"] < 1e-4 for line in lines)  # the engine's log-probs are the trainer's
    assert len(episodes(run)) == 2 * 2 * 2
    evaluations = episodes(run, "eval-*.jsonl")
    assert len(evaluations) == len({(e["id"], e["version"]) for e in evaluations}) == 3 * 4
    assert all(e["id"].startswith("toy/") and e["split"] == "test" and e["final"] for e in evaluations)
    assert list((run / "checkpoints").iterdir())
    assert list(run.glob("events.*"))
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    curve = results.read(run / "results.json")
    assert sorted(curve) == [0, 1, 2]
    assert all(curve[step]["toy"].episodes == 4 for step in curve)


def test_an_asynchronous_run_with_prefix_rollouts_goes_on_where_it_was(tmp_path):
    """Weights are pushed into an engine that samples; continuations share what was said before."""
    arguments = ["train", "--config=debug", f"--workdir={tmp_path / 'run'}", "--config.steps=2"]
    arguments += ["--config.rollout.staleness=1", "--config.rollout.branches=1"]
    arguments += ["--config.agent.history=True", "--config.world.kwargs={'rounds': 2}"]
    credit = {"credit": "prefix", "entropy_coef": 0.01, "drop_equal": False}
    arguments += [f"--config.algorithm.args={credit}"]
    assert cli.main([*arguments]) == 0
    assert cli.main([*arguments, "--resume", "--config.steps=4"]) == 0
    steps = metrics(tmp_path / "run")
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["staleness/max"] for line in steps) == 1
    assert all(line["staleness/untrained_tokens"] == 0 for line in steps)
    assert all(line["update/applied"] == 1 and line["time/share_of_peak"] > 0 for line in steps)
    assert all(line.get("sampler/max", 0) < 1e-4 for line in steps)  # of what the step's own weights sampled
    found = episodes(tmp_path / "run")
    assert sorted((e["group"], e["member"]) for e in found) == [(g, m) for g in range(8) for m in range(2)]
    played_on = [(e, b) for e in found for b in e.get("branches", ())]
    assert len(played_on) > 4
    assert all(b["turns"][: b["at"]] == e["turns"][: b["at"]] and b["at"] >= 1 for e, b in played_on)


def test_a_broken_rule_is_a_line_and_exit_code_1(copy, tmp_path, capsys):
    file = tmp_path / "ruled.py"
    file.write_text(
        "from metagym.experiments.config import load, rule\n"
        "def get_config():\n"
        "    config = load('debug')\n"
        "    config.stop_rules.low = rule('policy/entropy', low=100.0)\n"
        "    config.steps = 4\n"
        "    return config\n"
    )
    assert cli.main(["train", f"--config={file}", f"--workdir={copy}", "--resume"]) == 1
    assert "step 3: policy/entropy is 5." in capsys.readouterr().err
    assert sorted(p.name for p in (copy / "checkpoints").iterdir())[-1] == "00000002"


def test_a_run_is_not_overwritten(run, capsys):
    before = (run / "metrics.jsonl").read_text()
    assert cli.main(["train", "--config=debug", f"--workdir={run}"]) == 2
    assert "holds a run already: --resume" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_text() == before


def test_a_run_goes_on(copy):
    arguments = ["train", "--config=debug", f"--workdir={copy}", "--resume", "--config.steps=3"]
    assert cli.main(arguments) == 0
    assert [line["step"] for line in metrics(copy)] == [1, 2, 3]
    assert len(episodes(copy)) == 3 * 2 * 2
    assert len(episodes(copy, "eval-*.jsonl")) == 4 * 4
    assert sorted(results.read(copy / "results.json")) == [0, 1, 2, 3]


def test_another_config_does_not_go_on_with_a_run(run, capsys):
    command = ["train", "--config=debug", f"--workdir={run}", "--resume", "--config.group_size=4"]
    assert cli.main(command) == 2
    assert "begun with another config: group_size was 2 and is 4" in capsys.readouterr().err


def test_a_damaged_config_is_named(copy, capsys):
    (copy / "config.json").write_text("{")
    assert cli.main(["train", "--config=debug", f"--workdir={copy}", "--resume"]) == 2
    assert "config.json is damaged" in capsys.readouterr().err


def test_there_must_be_a_run_to_go_on_with(tmp_path, capsys):
    assert cli.main(["train", "--config=debug", f"--workdir={tmp_path / 'none'}", "--resume"]) == 2
    assert "there is no run to resume" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_eval_measures_the_newest_checkpoint(copy, capsys):
    assert cli.main(["eval", "--config=debug", f"--workdir={copy}"]) == 0
    out = capsys.readouterr().out
    assert "success at temperature 1" in out
    assert "step 2" in out
    measured, trained = results.read(copy / "evaluation.json"), results.read(copy / "results.json")
    assert measured[2]["toy"] == trained[2]["toy"]  # the same weights and seeds


def test_eval_measures_a_model_as_it_comes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["eval", "--config=debug"]) == 0
    assert "step 0" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_an_interrupted_run_is_saved_and_says_so(tmp_path):
    workdir = tmp_path / "run"
    command = [sys.executable, "-m", "metagym.cli", "train", "--config=debug", f"--workdir={workdir}"]
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    child = subprocess.Popen(
        [*command, "--config.steps=100000", "--config.evaluate_every=0"],
        env={**os.environ, **cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (workdir / "metrics.jsonl").exists() or len(metrics(workdir)) < 2:
            assert child.poll() is None, child.communicate()[1]
            time.sleep(0.1)
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode == 130, said
    done = len(metrics(workdir))
    assert f"metagym: stopped by SIGINT after step {done}, which is saved" in said
    assert (workdir / "checkpoints" / f"{done:08d}").is_dir()
    assert "Traceback" not in said


BAD = [
    (["--config.world.id=metagym/Toi-v0"], "unknown env 'metagym/Toi-v0'. Did you mean 'metagym/Toy-v0'"),
    (["--config.world.types=doors-rad"], "unknown type 'doors-rad'. Did you mean 'doors-red'"),
    (["--config.world.split=trian"], "unknown split 'trian'. Did you mean 'train'"),
    (["--config.world.kwargs={'tasks': ['doors-red:x']}"], "unknown task 'doors-red:x'"),
    (["--config.world.kwargs={'roundz': 3}"], "metagym/Toy-v0: "),
    (["--config.agent.kind=reakt"], "unknown agent 'reakt'. Did you mean 'react'"),
    (["--config.agent.args={'gaol': 'x'}"], "unknown argument of agent plain 'gaol'. Did you mean 'goal'"),
    (["--config.agent.template=go"], "config.agent.template has no {observation} in it"),
    (["--config.algorithm.name=gropo"], "unknown algorithm 'gropo'. Did you mean 'grpo'"),
    (
        ["--config.algorithm.args={'klip': 1}"],
        "unknown argument of algorithm grpo 'klip'. Did you mean 'clip'",
    ),
    (["--config.mesh.data=1000"], "config.mesh: "),
    (["--config.model.compute_dtype=float8"], "unknown dtype 'float8'"),
    (["--config.model.name=smollm2-136m"], "Did you mean 'smollm2-135m'"),
    (["--config.model.chat_template={% for"], "chat template"),
    (["--config.evaluate.toy.episodes=100000"], "config.evaluate.toy asks for 100000 episodes"),
    (["--config.evaluate.toy.types=doors-rad"], "unknown type 'doors-rad'"),
    (["--config.sampling.context=100000"], "context 100000 exceeds the model's"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_a_config_that_cannot_work_is_a_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    assert cli.main(["train", "--config=debug", f"--workdir={tmp_path / 'run'}", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("metagym: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "run" / "config.json").exists()  # so the same command works once it is mended


def test_a_world_without_its_extra_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    from metagym.envs.minihack import catalog

    monkeypatch.setattr(catalog, "installed", lambda package: False)
    arguments = ["--config.world.id=metagym/MiniHack-v0", "--config.world.types=()"]
    assert cli.main(["train", "--config=debug", f"--workdir={tmp_path / 'run'}", *arguments]) == 2
    assert "pip install 'metagym-rl[minihack]'" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "gone", "config"])
def test_a_broken_model_folder_is_explained(damage, run, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(run / "random_model", model)
    weights = model / "model.safetensors"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "empty":
            weights.write_bytes(b"")
        case "text":
            weights.write_text("<html>not found</html>")
        case "gone":
            weights.unlink()
        case "config":
            (model / "config.json").write_text('{"model_type": "bert"}')
    command = ["train", "--config=debug", f"--workdir={tmp_path / 'run'}", f"--config.model.name={model}"]
    assert cli.main(command) == 2
    said = capsys.readouterr().err
    assert str(model) in said
    assert said.count("\n") == 1


def test_the_template_is_the_whole_message():
    config = config_lib.load("debug")
    config.agent.template = 'You see: {observation}\n{"action": "'
    agent = build.build_agent(config)
    assert agent.prompt("a {door}", {}, 3) == 'You see: a {door}\n{"action": "'
    assert agent.system is None


def test_envs_are_used_again():
    config = config_lib.load("debug")
    pool = build.EnvPool(lambda: build.build_env(config))
    seen = set()
    for _ in range(3):
        pool.play(lambda env: seen.add(id(env)))
    pool.play(lambda env: pool.play(lambda other: seen.update({id(env), id(other)})))
    assert len(seen) == 2
    pool.close()


def test_what_may_change_on_resume_exists():
    assert set(train_lib.FREE_ON_RESUME) <= set(config_lib.base())


def test_attempts_and_predictions(tmp_path, capsys):
    """Several attempts at each task give Pass@k, and a predictions file for each."""
    arguments = ["--config.evaluate.toy.attempts=3", f"--predictions={tmp_path / 'out'}"]
    assert cli.main(["eval", "--config=debug", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "toy, Pass@2" in printed
    assert "toy, Pass@3" in printed
    files = [tmp_path / "out" / f"toy{n}.jsonl" for n in ("", "-2", "-3")]
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [len({r["instance_id"] for r in each}) for each in rows] == [4, 4, 4]
    assert {(r["model_name_or_path"], r["model_patch"]) for each in rows for r in each} == {("random", "")}


def test_a_prediction_is_what_was_changed(tmp_path):
    """By the real environment: the patch that was graded, and an episode that has none."""
    fix = "```\nshell sed -i '2s/ [-+*] / + /' calc/add.py\n```"
    submit = "```\nsubmit\n```"
    replies = {"add-1": [fix, submit], "add-2": [submit]}

    def make():
        return gymnasium.make("metagym/SWE-v0", disable_env_checker=True, tasks=list(replies))

    def episode(request):
        env, script = make(), iter(replies[request.task.id])
        try:
            return play(env, lambda messages: next(script), request.task, seed=request.seed, agent=swe())
        finally:
            env.close()

    evaluation = train_lib.Evaluation(make().unwrapped.tasks, episode, False, 1)
    score, groups = evaluation.run(config_lib.load("debug"), 0)
    assert (score.successes, score.episodes) == (1, 2)
    train_lib._predict(groups, "m", tmp_path / "swe")
    lines = (tmp_path / "swe.jsonl").read_text().splitlines()
    rows = {r["instance_id"]: r["model_patch"] for r in map(json.loads, lines)}
    assert "+    return" in rows["add-1"]
    assert rows["add-2"] == ""
