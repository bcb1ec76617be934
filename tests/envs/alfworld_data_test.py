"""The index of the games on disk: what is found, what is refused and named, and what is remembered."""

import json
import logging
import os
from pathlib import Path

import pytest

from metagym.envs.alfworld import ALFWorldEnv, data, generate
from metagym.envs.alfworld import game as games
from metagym.errors import InputError, WorldError

DOMAIN = "(define (domain alfred) of a test)"
GRAMMAR = '"rhs": "Your task is to: UNKNOWN GOAL." of a test'


@pytest.fixture(autouse=True)
def _known_texts(monkeypatch, tmp_path):
    """Game files of a test carry these texts; the real ones come with the alfworld package."""
    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setattr(games, "DOMAINS", {games._digest(DOMAIN): "test"})
    monkeypatch.setattr(games, "GRAMMARS", {games._digest(GRAMMAR.replace("UNKNOWN GOAL.", "")): "test"})
    data.forget()
    yield
    data.forget()


def write(root, split="train", kind=games.TYPES[0], number=0):
    return generate.write(root, split, kind, number, DOMAIN, GRAMMAR)


@pytest.fixture
def root(tmp_path):
    for number in range(3):
        write(tmp_path / "data", number=number)
    write(tmp_path / "data", "valid_seen", games.TYPES[3], 7)
    write(tmp_path / "data", "valid_unseen", games.TYPES[5], 8)
    return tmp_path / "data"


def change(path, **fields):
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def index(root):
    data.forget()
    return data.load(data.find_root(root))


def test_games_are_found_by_split_and_type(root):
    found = index(root)
    assert [(t.split, t.type) for t in found.tasks] == [
        *[("train", games.TYPES[0])] * 3,
        ("valid_seen", games.TYPES[3]),
        ("valid_unseen", games.TYPES[5]),
    ]
    assert not found.problems
    assert data.find_root(root / "json_2.1.1") == data.find_root(root)  # the folder itself will do, too


def test_traj_data_is_not_needed(root):
    for path in root.rglob("traj_data.json"):
        path.unlink()
    assert len(index(root).tasks) == 5


def test_a_game_on_disk_is_played(root, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(root))
    with ALFWorldEnv(split="validation") as env:
        (task,) = env.tasks
        _, info = env.reset(seed=0)
        assert (
            info["task"] == task.id == info["extra.gamefile"].partition("json_2.1.1/")[2].rpartition("/")[0]
        )
        assert info["type"] == games.TYPES[3]
        for command in json.loads(Path(info["extra.gamefile"]).read_text())["walkthrough"]:
            _, reward, terminated, _, info = env.step(command)
        assert (reward, terminated, info["success"], info["progress"]) == (1.0, True, True, 1.0)


OTHER_GOAL = generate._GOAL[games.TYPES[4]].replace("{target}", "Mug").replace("{place}", "Cabinet")


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        (lambda p: p.unlink(), "missing", "no game.tw-pddl"),
        (lambda p: p.write_bytes(p.read_bytes()[:-100]), "broken", "not JSON"),
        (lambda p: p.write_bytes(b"\xff\x00"), "broken", "not JSON"),
        (lambda p: p.write_text("[]"), "broken", "pddl_domain"),
        (lambda p: change(p, pddl_problem=None), "broken", "pddl_problem"),
        (lambda p: change(p, pddl_domain=DOMAIN + " "), "version", "domain"),
        (lambda p: change(p, grammar=GRAMMAR + " put {o} in/on {r}"), "version", "put in/on"),
        (lambda p: change(p, pddl_domain=DOMAIN + "\ud800"), "version", "domain"),
        (lambda p: change(p, grammar=GRAMMAR + "\ud800"), "version", "grammar"),
        (lambda p: change(p, walkthrough=["put mug 1 in/on shelf 1"]), "version", "walkthrough"),
        (lambda p: change(p, walkthrough="look"), "broken", "walkthrough"),
        (lambda p: change(p, solvable=False), "unsolvable", "solvable"),
        (
            lambda p: change(p, grammar=GRAMMAR.replace("UNKNOWN GOAL.", "put a cat in sofa.")),
            "mismatch",
            "cat",
        ),
    ],
)
def test_a_bad_file_is_named_counted_and_left_out(root, caplog, spoil, kind, says):
    path = sorted(root.glob("json_2.1.1/train/*/*/game.tw-pddl"))[1]
    spoil(path)
    with caplog.at_level(logging.INFO, logger="metagym.alfworld"):
        found = index(root)
    id = str(path.parent.relative_to(root / "json_2.1.1"))
    assert list(found.problems) == [id]
    assert found.problems[id][0] == kind
    assert says in found.problems[id][1]
    assert len(found.tasks) == 4
    assert f"1 left out, {kind}" in caplog.text
    assert id in caplog.text
    with ALFWorldEnv(data=root) as env:
        assert id not in [t.id for t in env.tasks]
        with pytest.raises(InputError, match="can't be played"):
            env.reset(options={"task": id})


def test_folder_and_goal_must_agree(root):
    task = next(root.glob("json_2.1.1/valid_seen/*"))
    task.rename(task.with_name(task.name.replace("heat", "cool")))
    ((_, (kind, reason)),) = index(root).problems.items()
    assert kind == "mismatch"
    assert "pick_cool" in reason
    assert "pick_heat" in reason


def test_what_alfworld_leaves_out_is_counted_apart(root, caplog):
    (root / "json_2.1.1/train/pick_and_place_simple-AppleSliced-None-Fridge-1/trial_1").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, logger="metagym.alfworld"):
        assert [kind for kind, _ in index(root).problems.values()] == ["sliced"]
    assert not caplog.text


def test_the_index_is_kept_and_only_changed_files_are_read(root, monkeypatch):
    index(root)
    read = []
    real = data.check
    monkeypatch.setattr(data, "check", lambda root, id: read.append(id) or real(root, id))
    assert len(index(root).tasks) == 5
    assert read == []
    path = next(root.glob("json_2.1.1/valid_seen/*/*/game.tw-pddl"))
    change(path, solvable=False)
    write(root, number=9)
    next(root.glob("json_2.1.1/valid_unseen/*/*/game.tw-pddl")).unlink()
    found = index(root)
    assert len(read) == 2
    assert len(found.tasks) == 4
    assert sorted(kind for kind, _ in found.problems.values()) == ["missing", "unsolvable"]


@pytest.mark.parametrize("spoil", [lambda p: p.write_text("{"), lambda p: p.write_text('{"version": 1}')])
def test_a_spoilt_cache_is_made_again(root, spoil):
    index(root)
    spoil(data._cache_file(data.find_root(root)))
    assert len(index(root).tasks) == 5


def test_a_cache_that_cannot_be_written_is_only_slower(root, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "file"))
    assert len(index(root).tasks) == 5


def test_many_files_are_checked_by_several_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(data.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(data, "_PER_PROCESS", 4)
    for number in range(10):
        folder = tmp_path / data.LAYOUT / "train" / f"task-{number}" / "trial"
        folder.mkdir(parents=True)
        (folder / "game.tw-pddl").write_text("{}" if number % 3 else "[")
    root = data.find_root(tmp_path)
    ids = [id for id, _ in data._scan(root)]
    alone = [data.check(str(root), id) for id in ids]
    assert data._check_all(root, ids) == alone
    monkeypatch.setattr(data.sys, "executable", "/bin/false")  # a helper that dies: its share is done here
    assert data._check_all(root, ids) == alone


def test_a_file_that_changes_later_is_a_failure_of_the_world(root):
    with ALFWorldEnv(data=root, split="valid_seen") as env:
        env.world.index().path(env.tasks[0].id).write_text("{}")
        with pytest.raises(WorldError, match="has changed"):
            env.reset()


def test_no_data_is_said_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=r"ALFWORLD_DATA.*split='generated'"):
        ALFWorldEnv()
    with ALFWorldEnv(split=None) as env:  # all there are: the generated ones
        assert {t.split for t in (env.tasks[0], env.tasks[-1])} == {"generated", "generated_test"}
    with pytest.raises(InputError, match="expected json_2"):
        ALFWorldEnv(data=tmp_path / "nowhere")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"\$ALFWORLD_DATA.*expected json_2"):
        ALFWorldEnv()
    with ALFWorldEnv(split="generated") as env:  # which need none
        env.reset(seed=0)
    monkeypatch.delenv("ALFWORLD_DATA")
    (tmp_path / data.LAYOUT / "train" / "a" / "b").mkdir(parents=True)
    (tmp_path / data.LAYOUT / "valid_seen").write_text("no folder")
    with pytest.raises(InputError, match=r"no game can be played.*\n1 left out|1 left out"):
        ALFWorldEnv(data=tmp_path)


def test_all_splits_are_one_sequence(root):
    with ALFWorldEnv(data=root, split=None) as env:
        assert len(env.tasks) == 5 + 6 * 1_200_000
        assert [t.split for t in (env.tasks[0], env.tasks[3], env.tasks[5])] == [
            "train",
            "valid_seen",
            "generated",
        ]
        assert env.tasks[-1] == env.tasks[len(env.tasks) - 1]
        assert env.tasks[4] in env.tasks
        assert [t.split for t in env.tasks[4:6]] == ["valid_unseen", "generated"]
        with pytest.raises(IndexError):
            env.tasks[len(env.tasks)]


def test_unreadable_files_are_named(root, monkeypatch):
    path = next(root.glob("json_2.1.1/valid_seen/*/*/game.tw-pddl"))
    path.unlink()
    os.symlink("/proc/self/mem", path)  # opens, and fails to read
    ((_, (kind, reason)),) = index(root).problems.items()
    assert kind == "broken"
    assert "read" in reason
