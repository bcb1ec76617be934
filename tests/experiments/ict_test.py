"""Collecting, training and measuring a reflector, with a tiny random model; errors are told."""

import contextlib
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from metagym import cli
from metagym.errors import InputError
from metagym.experiments import build, ict, ict_report
from metagym.experiments import config as config_lib
from metagym.meta import read_experience
from metagym.models import Decoder, param_shardings
from metagym.proxy.backends.embedded import EmbeddedBackend
from metagym.proxy.render import Renderer
from metagym.proxy.session import Session
from metagym.rl.metrics import read_jsonl
from metagym.rl.train_step import abstract_state
from metagym.types import Message


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """What the three commands leave behind."""
    folder = tmp_path_factory.mktemp("study")
    common = ["--config=ict_debug", f"--config.world.kwargs.data={folder / 'tuples.jsonl'}"]
    assert cli.main(["ict", "collect", *common, f"--out={folder / 'tuples.jsonl'}"]) == 0
    arguments = [*common, f"--workdir={folder / 'run'}"]
    assert cli.main(["train", *arguments, "--config.record_traces=True"]) == 0
    assert cli.main(["ict", "eval", *arguments]) == 0
    return folder


def test_collected_tuples(study):
    found = read_experience(study / "tuples.jsonl")
    assert len(found) == 2 * 2  # types, meta-turns
    assert {e.type for e in found} == {"doors-red", "food-plum"}
    for e in found:
        assert len(e.batch) == len(e.next) == len(e.held_out) == 2
        assert len({id for id, _ in (*e.batch, *e.next, *e.held_out)}) == 6
        assert e.actor == ({"actor": "rule_follower"},)
        assert e.observation
    assert {e.prompt for e in found if e.meta_turn == 0} == {None}
    runs = read_jsonl(study / "tuples.runs.jsonl")
    assert [len(r["turns"]) for r in runs] == [3, 3]
    assert all(len(t["episodes"]) == 2 for r in runs for t in r["turns"])


def test_a_stopped_collection_goes_on(study, tmp_path):
    file = tmp_path / "tuples.jsonl"
    lines = (study / "tuples.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:2]) + lines[2][:50])
    told = []
    ict.collect(config_lib.load("ict_debug"), file, None, told.append)
    assert "1 are left" in told[0]
    assert sorted(file.read_text().splitlines()) == sorted(line.strip() for line in lines)


def test_only_the_reflectors_tokens_train(study):
    episodes = [r for f in (study / "run" / "episodes").glob("0*.jsonl") for r in read_jsonl(f)]
    assert len(episodes) == 4
    for e in episodes:
        (trace,) = e["traces"]
        assert trace["trainable"] == len(trace["logprobs"]) <= 4
        assert len(e["turns"]) == 1
    (metrics,) = [r for r in read_jsonl(study / "run" / "metrics.jsonl") if "tokens/trained" in r]
    assert metrics["tokens/trained"] == sum(t["trainable"] for e in episodes for t in e["traces"])
    assert metrics["update/applied"] == 1.0


def test_members_of_a_group_saw_the_same(study):
    episodes = [r for f in (study / "run" / "episodes").glob("0*.jsonl") for r in read_jsonl(f)]
    by_task = {}
    for e in episodes:
        by_task.setdefault((e["task"], e["seed"]), []).append(e["turns"][0]["observation"])
    assert [len(seen) for seen in by_task.values()] == [2, 2]
    assert all(len(set(seen)) == 1 for seen in by_task.values())


def test_measured_runs(study):
    runs = read_jsonl(study / "run" / "ict" / "runs.jsonl")
    per_reflector = 2 * 2  # types, k
    assert len(runs) == 6 * per_reflector + 1
    for r in runs:
        tasks = [id for t in r["turns"] for id in t["tasks"]]
        assert len(set(tasks)) == len(tasks) == r["k"] * len(r["turns"])
        assert all(t["observation"] and "prompt" in t and t["episodes"] for t in r["turns"])
    held_out = [r for r in runs if r["row"] == "held_out"]
    assert all(len(r["turns"]) == 4 for r in held_out)  # more than in training
    assert all(t["validation"] >= 0 and t["selected_score"] >= 0 for r in held_out for t in r["turns"])

    def of(name):
        chosen = [r for r in held_out if r["reflector"] == name]
        return {(r["type"], r["k"]): [t["returns"] for t in r["turns"]] for r in chosen}

    assert of("initial") == of("noop")  # the whole machinery changes nothing
    best = next(r for r in held_out if r["reflector"] == "best_of")
    assert len({t["prompt"] for t in best["turns"][1:]}) == 1
    assert best["about"]["sampling"]["max_tokens"] == 4
    assert next(r for r in held_out if r["reflector"] == "trained")["about"]["step"] == 1


def test_an_evaluation_goes_on_and_reports(study):
    folder = study / "run" / "ict"
    before = (folder / "runs.jsonl").read_text()
    lines = before.splitlines(keepends=True)
    toy = next(line for line in lines if '"row": "toy"' in line)
    (folder / "runs.jsonl").write_text("".join(line for line in lines if line != toy) + toy[:100])
    config = config_lib.load("ict_debug")
    rows = {"toy": config.ict.evaluate.toy}
    told = []
    ict.evaluate(config_lib.changed(config, ict__evaluate=rows), folder, None, told.append)
    assert "1 are left" in told[0]
    again = read_jsonl(folder / "runs.jsonl")
    assert len(again) == len(lines)
    ict_report.write_report(again, folder)
    table = (folder / "table.md").read_text()
    assert "| held_out | 3 | trained | selected | 2 |" in table
    assert "| toy | 3 | initial | last | 1 |" in table
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((folder / "results.json").read_text())) == 6 * 2 * 2 + 1


def test_types_of_training_can_not_be_held_out(study, tmp_path):
    config = config_lib.load("ict_debug")
    config.ict.evaluate.held_out.types = ("doors-red", "tools-saw")
    config.world.kwargs.data = str(study / "tuples.jsonl")
    with pytest.raises(InputError, match="must be disjoint"):
        ict.evaluate(config, tmp_path, None, lambda text: None)
    config = config_lib.load("ict_debug")
    config.ict.types = ("tools-saw",)
    with pytest.raises(InputError, match="must be disjoint"):
        ict.collect(config, tmp_path / "t.jsonl", None, lambda text: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--config.ict.collect=untraind"], "untrained"),
        (["--config.ict.collect=trained"], "needs --workdir"),
        (["--config.actor.kind=endpont"], "endpoint"),
        (["--config.ict.world=metagym/Rulse-v0"], "metagym/Rules-v0"),
        (["--config.ict.transcript={'colour': 1}"], "colour"),
        (["--config.ict.k=0"], "ict.k"),
    ],
)
def test_what_can_not_work_is_told(changes, message, capsys, tmp_path):
    arguments = ["ict", "collect", "--config=ict_debug", f"--out={tmp_path / 't.jsonl'}", *changes]
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_prompts_are_chosen_on_another_split(tmp_path):
    config = config_lib.load("ict_debug")
    config.ict.evaluate.held_out.validation_split = "test"
    with pytest.raises(InputError, match="another split"):
        ict.evaluate(config, tmp_path, None, lambda text: None)


def test_an_engine_as_actor_says_what_it_is(tmp_path):
    config = config_lib.load("ict_debug")
    config.actor.kind, config.actor.max_tokens, config.actor.temperature = "engine", 3, 0.5
    with contextlib.ExitStack() as stack:
        actor = ict.build_actor(config, stack, tmp_path)
        told = actor.about()
        assert told["model"] == "random"
        assert told["version"] == 0
        assert told["sampling"]["temperature"] == 0.5
        hello = [Message("user", "hello")]
        one, other = actor.new_chat(3), actor.new_chat(3)
        assert isinstance(one, Session)
        assert isinstance(other, Session)
        assert one.chat(hello) == other.chat(hello)


# As Qwen2.5 writes it: without a system message the template makes one up.
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("initial", ["", "Be brief."])
def test_the_engine_sees_the_prompt_and_no_other_system_message(initial, tmp_path, monkeypatch):
    config = config_lib.changed(config_lib.load("ict_debug"), ict__k=1, ict__prompt=initial)
    config.actor.kind, config.actor.chat_template = "engine", DEFAULT_SYSTEM
    config.actor.max_tokens, config.actor.max_turns = 3, 2
    seen, submit = [], EmbeddedBackend.submit

    def spy(self, prompt_ids, sampling):
        seen.append([int(i) for i in prompt_ids])
        return submit(self, prompt_ids, sampling)

    monkeypatch.setattr(EmbeddedBackend, "submit", spy)
    with contextlib.ExitStack() as stack:
        envs = ict.Envs(**ict.ict_arguments(config, ict.build_actor(config, stack, tmp_path)))
        stack.callback(envs.close)
        directory = tmp_path / "actor" / "random_model"
        assert "You are a helpful assistant." in Renderer.from_dir(directory, DEFAULT_SYSTEM).default_system
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

        def ids(text):
            return tokenizer.encode(text, add_special_tokens=False).ids

        start, block = ids("<|im_start|>"), ids("<|im_start|>system")
        assert len(start) == 1
        with envs.one() as env:
            for prompt in (None, "Open the red door.", ""):
                seen.clear()
                if prompt is None:
                    env.reset(seed=0, options={"task": "doors-red:0"})
                else:
                    env.step(prompt)
                text = initial if prompt is None else prompt
                system = f"<|im_start|>system\n{text}<|im_end|>\n" if text else ""
                opening = ids(f"{system}<|im_start|>user\n")
                assert len(seen) == 2  # turns
                for tokens in seen:
                    assert tokens[: len(opening)] == opening
                    assert sum(tokens[i : i + len(block)] == block for i in range(len(tokens))) == bool(text)
                assert seen[0].count(start[0]) == bool(text) + 2  # the user's, and the reply's


def test_intervals():
    assert ict_report.interval([0.0, 1.0]) == pytest.approx((0.5, 0.5 - 6.353, 0.5 + 6.353), abs=1e-3)
    mean, low, high = ict_report.interval([0.2, 0.4, 0.6, 0.8])
    assert (mean, low, high) == pytest.approx((0.5, 0.0891, 0.9109), abs=1e-3)  # t = 3.182, s = 0.2582
    assert ict_report.interval([1.0]) == (1.0, -math.inf, math.inf)
    x = np.linspace(0, 1, 200)
    assert ict_report.interval(x.tolist())[1] == pytest.approx(0.5 - 1.98 * x.std(ddof=1) / math.sqrt(200))
    with pytest.raises(ValueError, match="at least one"):
        ict_report.interval([])


def test_valid_actions_may_count():
    config = config_lib.changed(config_lib.load("ict_debug"), ict__valid_weight=0.5)
    assert isinstance(ict.build_hooks(config), ict.ValidActions)


PAPER = [name for name in config_lib.available() if name.startswith("ict_paper")]


GENERATED = {"train": "generated", "valid_seen": "generated_validation"}


def without_downloads(config, data):
    """A setting of the paper with tiny random models, games that are made here, and no run in its rows."""
    config = config_lib.changed(config, model__name="random", model__chat_template="plain", mesh__fsdp=1)
    config = config_lib.changed(config, actor__slots=1, actor__context=512, world__kwargs__data=str(data))
    rows = {name: {**row, "runs": 0} for name, row in config.ict.evaluate.to_dict().items()}
    for row in rows.values():
        if "ALFWorld" in (row["world"] or config.ict.world):
            row |= {s: GENERATED[row[s]] for s in ("split", "validation_split")}
    split = GENERATED[config.ict.split] if "ALFWorld" in config.ict.world else config.ict.split
    return config_lib.changed(config, ict__evaluate=rows, ict__split=split, world__split=split)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_settings_can_be_built(name, tmp_path):
    """All but the weights: worlds, actor, tuples, rows of the evaluation."""
    data, told = tmp_path / "tuples.jsonl", []
    config = without_downloads(config_lib.load(name), data)
    with contextlib.ExitStack() as stack:
        made = ict.world_arguments(config, stack, tmp_path)
        envs = ict.Envs(**ict.ict_arguments(config, made["actor"]))
        stack.callback(envs.close)
        assert envs.types == tuple(config.ict.types)
        with envs.one() as env:
            meta = env.unwrapped
            lines = []
            for kind in envs.types:
                first, then = itertools.islice(meta.draws(kind, 0, config.ict.k), 2)
                batches = [[(task.id, seed) for task, seed in batch] for batch in (first, then)]
                record = {"id": f"x/{kind}", "type": kind, "split": meta.inner.split, "world": meta.inner.id}
                record |= {"world_kwargs": meta.inner.kwargs, "prompt": None, "observation": "seen"}
                record |= {"batch": batches[0], "returns": [0.0] * config.ict.k, "score": 0.0}
                lines.append(json.dumps(record | {"next": batches[1]}) + "\n")
        data.write_text("".join(lines))
        assert {e.type for e in read_experience(data)} == set(config.ict.types)
        world = build.build_env(config, **made)
        stack.callback(world.close)
        assert world.reset(seed=0)[0] == "seen"
    assert ict.evaluate(config, tmp_path / "ict", tmp_path, told.append) == []
    assert "0 runs, 0 are left" in told[0]


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models_and_updates_have_their_shapes(name):
    config = config_lib.load(name)
    config_lib.check(config)
    agent = build.build_agent(config)
    assert config.agent.args.goal in agent.prompt("seen", {}, 0)
    shape = build.model_config(config)
    assert (
        build.model_config(config_lib.changed(config, model__name=config.actor.model or config.model.name))
        == shape
    )
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(shape)))
    assert sum(p.size for p in jax.tree.leaves(params)) == 7_615_616_512  # as published
    mesh, optimizer = build.build_mesh(config), build.build_optimizer(config)
    params = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        params,
        param_shardings(params, mesh),
    )
    state = abstract_state(params, optimizer, mesh)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.params, state.opt_state)))
    assert held == pytest.approx(3 * 4 * 7_615_616_512, rel=1e-6)  # weights and two moments
    build.build_policy(config, mesh)(graphdef)
    assert build.build_algorithm(config).name == "grpo"
    assert config.batch.length >= config.sampling.context
