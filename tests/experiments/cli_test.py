"""The command line: help, unknown commands, errors and exit codes."""

import errno
import subprocess
import sys

import pytest

from metagym import cli
from metagym.errors import InputError, MissingExtraError


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"metagym {name}" in out for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main([name, "--help"])
    assert done.value.code == 0
    assert f"usage: metagym {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "metagym: unknown command 'trian'. Did you mean 'train'?"),
        ([], "metagym: no command given."),
        (["train"], "metagym: no config given: --config=FILE. Known: debug"),
        (["train", "--confg=debug"], "metagym: unknown option '--confg'. Did you mean '--config'"),
        (["train", "--confg", "debug"], "metagym: unknown option '--confg'. Did you mean '--config'"),
        (["eval", "--workdir=x", "--cnfig=debug"], "metagym: unknown option '--cnfig'. Did you mean"),
        (["ict", "collect", "--confg=x"], "metagym: unknown option '--confg'. Did you mean '--config'"),
        (
            ["ict", "eval", "--config=debug", "--outt=x"],
            "metagym: unknown option '--outt'. Did you mean '--out'",
        ),
        (["train", "--config.steps=3", "--flagfile=x"], "metagym: no config given: --config=FILE."),
        (["train", "--config=no_such"], "metagym: unknown config file 'no_such'."),
        (["train", "--config=debug", "--config.stepz=1"], "metagym: unknown config field 'stepz'."),
        (["train", "--config=debug", "--resume"], "metagym: --resume needs --workdir=DIR"),
        (
            ["train", "--config=debug", "--workdri=x"],
            "metagym: unknown option '--workdri'. Did you mean '--workdir'",
        ),
    ],
)
def test_wrong_input_is_a_line_on_stderr_and_exit_code_2(arguments, message, capsys):
    assert cli.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(message)
    assert said.out == ""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("no such thing."), 2, "metagym: no such thing.\n"),
        (MissingExtraError("it", "train"), 2, "metagym: it needs the extra [train]"),
        (KeyboardInterrupt(), 130, "metagym: interrupted\n"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            1,
            "metagym: [Errno 28] No space left on device\n",
        ),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "/f/x"), 1, "metagym: [Errno 20] Not a dir"),
    ],
)
def test_errors_become_exit_codes(error, code, said, monkeypatch, capsys):
    def fail(_):
        raise error

    monkeypatch.setattr("metagym.experiments.doctor.command", fail)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(
    ("module", "extra"), [("jax", "train"), ("ml_collections", "train"), ("nle", "minihack")]
)
def test_a_missing_extra_is_named(module, extra, monkeypatch, capsys):
    def absent(_):
        raise ModuleNotFoundError(f"No module named '{module}'", name=module)

    monkeypatch.setattr(cli.importlib, "import_module", absent)
    assert cli.main(["train"]) == 2
    assert f"pip install 'metagym-rl[{extra}]'" in capsys.readouterr().err


def test_finding_a_command_imports_nothing_heavy():
    code = "import sys, metagym.cli; print({'jax', 'flax', 'ml_collections', 'nle'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
