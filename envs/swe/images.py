"""Repositories that an image holds: each is made ready once; agent and grader start from what came of it.

In a container of its own, before any agent: the task's change goes in (a bug, say), what the agent may not
see is read out and removed, every `.git` with it, and the files that were tracked become one commit. What
else lay there (caches, environments, what a build made) stays, and is named in `info/exclude`, so that it is
no change of the agent's. The commit's objects are kept on this machine too, and mounted where no agent can
change them. Where the known fix is a script, it runs once, in another container: the fix is what it changes.
The image must have bash and git.
"""

import dataclasses
import functools
import hashlib
import os
import shlex
import shutil
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path
from weakref import WeakKeyDictionary

from metagym.envs.swe import patches
from metagym.envs.swe.bubblewrap import own
from metagym.envs.swe.instances import AUTHOR, Instance, cache_folder, git, mounts
from metagym.envs.swe.pool import WarmPool
from metagym.errors import InputError, SandboxError
from metagym.protocols import Sandbox, SandboxFactory
from metagym.types import Limits

TIMEOUT_S = 600.0
_LIMITS = Limits(memory=8 << 30, disk=8 << 30, pids=512)
_ready: WeakKeyDictionary[SandboxFactory, dict[str, Future[Instance]]] = WeakKeyDictionary()
_lock = threading.Lock()

_COMMIT = r"""
set -e
cd WORKDIR
test "$(git rev-parse --show-toplevel 2>/dev/null)" = "$(pwd -P)" || git init -q
git ls-files -z >/tmp/.tracked
test -s /tmp/.tracked || { git add -A . && git ls-files -z >/tmp/.tracked; }
git ls-files -z -o --directory | while IFS= read -r -d '' f; do
  case "$f" in *$'\n'*) ;; *) printf '/%s\n' "$f" | sed 's/[][*?\\]/\\&/g' ;; esac
done >/tmp/.others
find . -name .git -prune -exec rm -rf {} +
git init -q
rm -rf .git/hooks
mkdir -p .git/info
cp /tmp/.others .git/info/exclude
echo 'ATTRIBUTES' >.git/info/attributes
while IFS= read -r -d '' f; do
  if [ -d "$f" ] && [ ! -L "$f" ]; then git add -A -f -- "$f"; else printf '%s\0' "$f"; fi
done </tmp/.tracked | git update-index --add --remove -z --stdin
git commit -q --no-verify --allow-empty -m 'The repository as it is'
git repack -q -a -d
rm -rf .git/logs .git/COMMIT_EDITMSG
git bundle create /tmp/.bundle HEAD --branches
rm -f /tmp/.tracked
"""


def ready(factory: SandboxFactory, instance: Instance) -> Instance:
    """The instance as it is started: itself if its files are on this machine, else with the image that was
    made of its own, once for each factory. Raises InputError if the image is not there or can't be used, and
    SandboxError."""
    if instance.source or instance.base:
        return instance
    while isinstance(factory, WarmPool):  # it would keep sandboxes of the raw image ready
        factory = factory.factory
    key = f"{instance.id}-{instance.key()}"
    with _lock:
        made = _ready.setdefault(factory, {})
        future = made.get(key)
        mine = future is None
        if future is None:
            future = made[key] = Future()
    if mine:
        try:
            future.set_result(_make(factory, instance))
        except BaseException as error:
            with _lock:
                del made[key]
            future.set_exception(error)
    done = future.result()
    return dataclasses.replace(
        instance,
        image=done.image,
        base=done.base,
        change=b"",
        gold=done.gold,
        tests={**done.tests, **instance.tests},
        path=done.path,
    )


def _make(factory: SandboxFactory, instance: Instance) -> Instance:
    sandbox = factory.start(instance.image, (), _LIMITS, {"task": instance.id})
    try:
        run = functools.partial(_run, sandbox, instance)
        run("command -v git && test -d .", "has no git, which is needed to take out what an agent changes")
        path = run("echo $PATH", "has no shell").strip()
        if instance.change:
            sandbox.write("/tmp/.change", instance.change)
            run("git apply --whitespace=nowarn /tmp/.change", "does not fit the task's change")
        tests = {}
        for hidden in instance.hidden:
            inside = f"{instance.workdir}/{hidden}"
            if hidden in instance.test_files and hidden not in instance.tests:
                try:
                    tests[hidden] = sandbox.read(inside)
                except FileNotFoundError:
                    raise InputError(f"task {instance.id!r}: its image has no file {inside}.") from None
            place = shlex.quote(hidden if hidden.startswith("/") else inside)
            run(f"rm -rf {place}", f"keeps {place}")
        script = _COMMIT.replace("WORKDIR", shlex.quote(instance.workdir))
        run(
            f"(\n{script.replace('ATTRIBUTES', patches.ATTRIBUTES)}\n)",
            "holds no repository that git can read",
        )
        bundle, exclude = sandbox.read("/tmp/.bundle", 4 << 30), sandbox.read("/tmp/.others")
        run("rm -f /tmp/.bundle /tmp/.others /tmp/.change", "keeps files")
        base = _base(bundle, exclude)
        image = factory.snapshot(sandbox)
    finally:
        sandbox.close()
    made = dataclasses.replace(
        instance,
        image=image,
        base=base,
        change=b"",
        tests={**tests, **instance.tests},
        path=(*instance.path, *path.split(":")),
    )
    return made if made.gold or not made.solution else dataclasses.replace(made, gold=_gold(factory, made))


def _gold(factory: SandboxFactory, instance: Instance) -> bytes:
    """What the instance's solution changes."""
    sandbox = factory.start(instance.image, mounts(instance), _LIMITS, {"task": instance.id})
    try:
        for path, content in instance.solution.items():
            sandbox.write(f"/solution/{path}", content)
        _run(sandbox, instance, "bash /solution/solve.sh", "does not run its solution")
        gold = patches.take(sandbox, instance.workdir)
    finally:
        sandbox.close()
    if not gold:
        raise InputError(f"task {instance.id!r}: its solution changes nothing in {instance.workdir}.")
    return gold


def _run(sandbox: Sandbox, instance: Instance, command: str, what: str) -> str:
    env = {**instance.env(), **AUTHOR, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    result = sandbox.exec(
        f"{{ cd {shlex.quote(instance.workdir)} && {command}\n}}", TIMEOUT_S, env=env | {"LC_ALL": "C"}
    )
    if result.timed_out or result.limit:
        raise SandboxError(f"image {instance.image!r} could not be made ready: {result.output[-300:]}")
    if result.exit_code != 0:
        raise InputError(
            f"task {instance.id!r}: image {instance.image!r} {what}, or no folder {instance.workdir}: "
            f"{result.output.strip()[-300:]}"
        )
    return result.output


def _base(bundle: bytes, exclude: bytes) -> str:
    """The folder of a commit's objects, from the cache or made now."""
    name = hashlib.sha256(bundle + exclude).hexdigest()[:20]
    folder = cache_folder() / "bases" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            (work / "bundle").write_bytes(bundle)
            git(work, "clone", "-q", "--bare", "bundle", "base")
            (work / "base" / "info").mkdir(exist_ok=True)
            (work / "base" / "info" / "exclude").write_bytes(exclude)
            (work / "base").chmod(0o755)
            own(work / "base")
            try:
                os.rename(work / "base", folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return str(folder)
