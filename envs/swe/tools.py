"""The agent's tools: what an action means, and what it is answered.

An action is text. Its first line begins with the tool's name:

    shell COMMAND                      runs a command (more lines belong to it)
    view PATH [FIRST [LAST]]           shows a file with line numbers, or a folder
    scroll down | scroll up            shows the next or the previous part of that file
    search TEXT [in PATH]              lines that contain TEXT; quotes around a TEXT with blanks
    find NAME                          files whose path contains NAME
    create PATH                        writes a file; the lines that follow are its content
    edit PATH FIRST-LAST               replaces these lines by the lines that follow
    edit PATH                          replaces a text that occurs once:
    <<<<<<<
    the old text
    =======
    the new text
    >>>>>>>
    submit                             ends the work

`parse` is pure; `Tools` does it in a sandbox.
"""

import re
import shlex
from dataclasses import dataclass

from metagym.errors import FormatError
from metagym.protocols import Sandbox
from metagym.types import ExecResult

NAMES = ("shell", "view", "scroll", "search", "find", "create", "edit", "submit")
HELP = """\
shell COMMAND                run a command in bash; further lines belong to it
view PATH [FIRST [LAST]]     show a file with line numbers, or list a folder
scroll down | scroll up      the next or the previous part of that file
search TEXT [in PATH]        lines that contain TEXT
find NAME                    files whose path contains NAME
create PATH                  write a file; the lines that follow are its content
edit PATH FIRST-LAST         replace these lines by the lines that follow
edit PATH                    replace a text that occurs exactly once in the file:
<<<<<<<
old text
=======
new text
>>>>>>>
submit                       your work is done"""
_PAGE = 100  # lines of a view
_BLOCK = re.compile(r"<{7}[^\n]*\n(.*?)\n?={7}\n(.*?)\n?>{7}[^\n]*", re.DOTALL)
_HACKS = re.compile(
    r"git\s+(log\s+.*--all|reflog|fsck|rev-list\s+--all|stash\s+list|remote|fetch|pull|clone|show-ref)"
    r"|pip3?\s+(install|download)|\b(curl|wget)\b|conftest\.py|sitecustomize|\.pth\b|PYTEST_(ADDOPTS|PLUGINS)"
    r"|pytest\.ini|os\._exit|_pytest|gold|solution\.patch|rm\s+(-\w+\s+)*\S*test|/opt/metagym|kill\s+-9\s+(1|-1)\b"
)


@dataclass(frozen=True)
class Command:
    """A parsed action."""

    tool: str
    text: str = ""  # command, text to look for, content
    path: str = ""
    first: int | None = None
    last: int | None = None
    old: str | None = None  # of an edit by text


def looks_like_a_hack(action: str) -> bool:
    """Whether an action has the shape of what cheats do. It is counted, no more: honest work may need it."""
    return bool(_HACKS.search(action))


def parse(action: str) -> Command:
    """What an action says. Raises FormatError, whose message says how to do it right."""
    head, _, body = action.strip("\n").partition("\n")
    name, _, rest = head.strip().partition(" ")
    rest = rest.strip()
    if name not in NAMES:
        raise FormatError(f"There is no tool {name[:40]!r}. Begin with one of:\n{HELP}")
    if name == "submit":
        return Command("submit")
    if name == "shell":
        command = rest + ("\n" + body if body else "")
        if not command.strip():
            raise FormatError("shell needs a command, such as: shell ls")
        return Command("shell", text=command)
    if name == "scroll":
        if rest not in ("down", "up"):
            raise FormatError("Say: scroll down, or: scroll up")
        return Command("scroll", text=rest)
    if name == "find":
        if not rest:
            raise FormatError("find needs a part of a file's name, such as: find test_")
        return Command("find", text=rest.strip("'\""))
    if name == "search":
        return _search(rest)
    words = _words(rest)
    if not words:
        raise FormatError(f"{name} needs a path. " + HELP)
    path, numbers = words[0], words[1:]
    if name == "view":
        if len(numbers) > 2 or not all(n.isdigit() for n in numbers):
            raise FormatError(
                "Say: view PATH, or: view PATH FIRST LAST, with line numbers, such as: view a.py 10 40"
            )
        given = [int(n) for n in numbers]
        return Command(
            "view", path=path, first=given[0] if given else None, last=given[1] if len(given) > 1 else None
        )
    if name == "create":
        return Command("create", path=path, text=body + "\n" if body else "")
    return _edit(path, numbers, body)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _search(rest: str) -> Command:
    text, _, path = rest.rpartition(" in ")
    if not text:
        text, path = rest, ""
    text, path = text.strip(), path.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if not text:
        raise FormatError('search needs a text, such as: search "def add" in src')
    return Command("search", text=text, path=path)


def _edit(path: str, numbers: list[str], body: str) -> Command:
    if numbers:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", numbers[0])
        if len(numbers) > 1 or not match:
            raise FormatError("Say: edit PATH FIRST-LAST, such as: edit a.py 10-12, then the new lines.")
        first = int(match[1])
        return Command("edit", path=path, first=first, last=int(match[2] or first), text=body)
    blocks = _BLOCK.findall(body)
    if len(blocks) != 1:
        raise FormatError(
            "edit needs the old and the new text once, like this:\n"
            "edit PATH\n<<<<<<<\nold text\n=======\nnew text\n>>>>>>>"
        )
    old, new = blocks[0]
    if not old:
        raise FormatError("The old text is empty. To write a file anew, use create.")
    return Command("edit", path=path, old=old, text=new)


class Tools:
    """Does what a command says in a sandbox whose shell begins in `workdir`. One episode long.

    Raises SandboxError if the sandbox fails.
    """

    def __init__(self, sandbox: Sandbox, workdir: str, *, timeout_s: float, max_chars: int):
        self.sandbox, self._workdir = sandbox, workdir
        self._timeout_s, self._max_chars = timeout_s, max_chars
        self._shown: tuple[str, int] | None = None  # path and first line of the last view

    def run(self, command: Command) -> ExecResult:
        """The answer as an ExecResult, whose limit and time-out tell what happened to the sandbox."""
        result = getattr(self, f"_{command.tool}")(command)
        if isinstance(result, str):
            result = ExecResult(result, 0)
        return ExecResult(self._short(result.output), *_rest(result))

    def _short(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        half = self._max_chars // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._workdir}/{path}"

    def _shell(self, command: Command) -> ExecResult:
        result = self.sandbox.exec(command.text, self._timeout_s)
        note = f"[exit code {result.exit_code}]" if result.exit_code not in (0, None) else ""
        text = result.output or ("" if note else "[no output]")
        return ExecResult(
            text + ("\n" if note and text and not text.endswith("\n") else "") + note, *_rest(result)
        )

    def _view(self, command: Command) -> str | ExecResult:
        path = self._path(command.path)
        try:
            lines = self._lines(path)
        except FileNotFoundError:
            quoted = shlex.quote(path)
            return self.sandbox.exec(
                f"if test -d {quoted}; then ls -1Ap -- {quoted}; else echo 'no such file: '{quoted}; fi",
                30.0,
            )
        first = max(1, command.first or 1)
        last = min(len(lines), command.last or first + _PAGE - 1, first + 4 * _PAGE)
        self._shown = (command.path, first)
        if not lines:
            return f"{command.path} is empty."
        if first > len(lines):
            return f"{command.path} has {len(lines)} lines."
        shown = "\n".join(f"{n:6d}  {lines[n - 1]}" for n in range(first, last + 1))
        return f"{command.path}, lines {first} to {last} of {len(lines)}:\n{shown}"

    def _scroll(self, command: Command) -> str | ExecResult:
        if self._shown is None:
            return "There is nothing to scroll: view a file first."
        path, first = self._shown
        step = _PAGE - 5 if command.text == "down" else 5 - _PAGE
        return self._view(Command("view", path=path, first=max(1, first + step)))

    def _search(self, command: Command) -> ExecResult:
        where = shlex.quote(self._path(command.path) if command.path else ".")
        return self._listed(
            f"grep -rnIF --exclude-dir=.git -e {shlex.quote(command.text)} -- {where} | cut -c1-240 | "
            "head -n 51",
            "No line contains it.",
        )

    def _find(self, command: Command) -> ExecResult:
        return self._listed(
            "find . -name .git -prune -o -type f -print | sed 's|^./||' | "
            f"grep -F -e {shlex.quote(command.text)} | sort | head -n 51",
            "No file's path contains it.",
        )

    def _listed(self, script: str, nothing: str) -> ExecResult:
        result = self.sandbox.exec(script, self._timeout_s, cwd=self._workdir)
        lines = result.output.splitlines()
        more = "\n[more than 50: narrow it down]" if len(lines) > 50 else ""
        return ExecResult("\n".join(lines[:50]) + more if lines else nothing, *_rest(result))

    def _create(self, command: Command) -> str:
        return self._written(command.path, command.text.encode("utf-8", "surrogateescape"), "Written")

    def _edit(self, command: Command) -> str:
        path = self._path(command.path)
        try:
            content = self.sandbox.read(path).decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return f"There is no such file: {command.path}. To write a new one, use create."
        end = "\r\n" if "\r\n" in content else "\n"
        if command.old is not None:
            old, new = (t.replace("\n", end) for t in (command.old, command.text))
            count = content.count(old)
            if count != 1:
                how = "does not occur in" if not count else f"occurs {count} times in"
                return (
                    f"The old text {how} {command.path}: nothing was changed. Give it exactly, with blanks."
                )
            at = content.index(old)
            line = content.count("\n", 0, at) + 1
            content = content[:at] + new + content[at + len(old) :]
        else:
            lines = content.splitlines(keepends=True)
            first, last = command.first or 0, command.last or 0
            if not 1 <= first <= last <= len(lines):
                return f"{command.path} has {len(lines)} lines, not {first} to {last}: nothing was changed."
            text = "".join(part + end for part in command.text.split("\n")) if command.text else ""
            if text and last == len(lines) and not lines[-1].endswith("\n"):
                text = text.removesuffix(end)
            content, line = "".join([*lines[: first - 1], text, *lines[last:]]), first
        said = self._written(command.path, content.encode("utf-8", "surrogateescape"), "Changed")
        if not said.startswith("Changed"):
            return said
        around = self._view(Command("view", path=command.path, first=max(1, line - 3), last=line + 6))
        return f"Changed. {around}" if isinstance(around, str) else said

    def _written(self, path: str, content: bytes, how: str) -> str:
        try:
            self.sandbox.write(self._path(path), content)
        except OSError as error:
            return str(error)
        return f"{how}: {path}"

    def _lines(self, path: str) -> list[str]:
        return self.sandbox.read(path).decode("utf-8", "replace").splitlines()


def _rest(result: ExecResult) -> tuple:
    return result.exit_code, result.timed_out, result.limit, result.dropped, result.seconds
