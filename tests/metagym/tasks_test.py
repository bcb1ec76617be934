"""`metagym tasks`: what it lists, what it shows, and playing by hand."""

import io
import subprocess
import sys

import pytest

from metagym import cli, tasks


def run(capsys, *arguments):
    code = cli.main(["tasks", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(autouse=True)
def _no_data(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)


def test_list_names_every_world_with_its_splits(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert "metagym/Toy-v0: 440,000 tasks of 44 types\n  train: 352,000 tasks\n" in out
    assert "metagym/MiniHack-v0: 175,200,000 tasks of 146 types" in out
    assert "  valid_unseen: none, since there are no ALFWorld games on this machine: set $ALFW" in out
    assert "split='generated_test'" in out
    assert "metagym/ICT-v0: made of world= and actor=\n" in out


def test_a_reader_that_has_seen_enough_is_no_error():
    code = "from metagym import cli; import sys; sys.exit(cli.main(['tasks', 'list', 'toy', '--all']))"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        process.stdout.close()
        assert process.wait() == 141
        assert process.stderr
        assert process.stderr.read() == b""


def test_list_of_a_world(capsys):
    code, out, _ = run(capsys, "list", "toy", "--split=test", "--types=doors-red,food-apple")
    assert code == 0
    assert out.splitlines() == [
        "metagym/Toy-v0: 2,000 tasks of 2 types",
        "  test: 2,000 tasks",
        "types:",
        "  doors-red: 1,000 tasks",
        "  food-apple: 1,000 tasks",
        "tasks:",
        *(f"  {kind}:{n} (test)" for n in range(9000, 9006) for kind in ("doors-red", "food-apple")),
        "  ...",
    ]
    assert "  and 32 more (--all)\n" in run(capsys, "list", "metagym/Toy-v0")[1]
    assert "  boxes-orange: 10,000 tasks\n" in run(capsys, "list", "toy", "--all")[1]


def test_show_is_the_first_observation_and_the_info(capsys):
    code, out, _ = run(capsys, "show", "toy", "doors-red:9007", "--seed=1", "--rounds=1")
    assert code == 0
    assert out.startswith("You can: open ")
    assert "\ninfo:\n  task: doors-red:9007\n  seed: 1\n  success: False\n  admissible: ['open" in out
    assert "Goal: Reach the staircase down." in run(capsys, "show", "minihack", "Room-5x5:3")[1]


def test_a_seed_is_a_whole_number(capsys):
    for seed in ("-1", "x", "1.5"):
        with pytest.raises(SystemExit) as ended:
            tasks.command(["show", "toy", f"--seed={seed}"])
        assert ended.value.code == 2
        assert "no whole number" in capsys.readouterr().err


def test_playing_by_hand(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("?\ndance\nOpen the red door.\n"))
    code, out, _ = run(capsys, "play", "toy", "doors-red:3", "--rounds=1")
    assert code == 0
    assert "> open " in out  # the answer to "?", which is no turn
    assert "That is not possible." in out
    assert out.endswith("doors-red:3, seed 0: terminated, 2 turns, reward 1, outcome 1\n")


def test_the_player_may_leave(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("dance\n"))
    code, out, _ = run(capsys, "play", "toy", "doors-red:3")
    assert code == 0
    assert out.endswith("doors-red:3, seed 0: left, 1 turns, reward 0, outcome 0\n")


def test_a_world_that_fails_is_exit_code_1(capsys, monkeypatch):
    from metagym.envs.toy import ToyEnv
    from metagym.errors import WorldError

    def fail(self, action):
        raise WorldError("it broke")

    monkeypatch.setattr(ToyEnv, "_act", fail)
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    code, _, err = run(capsys, "play", "toy", "doors-red:3")
    assert code == 1
    assert "it broke" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "toi"], "unknown world 'toi'"),
        (["show"], "needs a world"),
        (["show", "toy", "doors-rot:1"], "unknown task 'doors-rot:1'"),
        (["show", "toy", "--rounds=x"], "can't be made with"),
        (["show", "toy", "--colour=red"], "can't be made with"),
        (["show", "toy", "extra", "words"], "unknown argument 'words'"),
        (["show", "alfworld"], "split='generated'"),
        (["show", "alfworld", "--split=test"], "split='generated_test'"),
    ],
)
def test_wrong_input_is_a_line_on_stderr(arguments, message, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
