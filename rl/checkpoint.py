"""Checkpoints: all or nothing, verified before they are believed, on any mesh.

A checkpoint is a directory named by its step, e.g. `00000040/`: `arrays/` (orbax), `host.json`, and
`manifest.json` with the size and SHA-256 of every file, written last. It is made under a temporary name and
renamed when it is whole, so that a kill at any moment leaves the earlier ones as they were. A complete
checkpoint is never written over.

Typed PRNG keys are stored as their data and come back typed. Arrays without elements are refused (orbax
cannot hold them). Leaves come back with the dtype they had.
"""

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from metagym.errors import CheckpointError, InputError

log = logging.getLogger("metagym.checkpoint")
STEP = re.compile(r"\d{8}")
TEMPORARY = ("tmp-*", "*.orbax-checkpoint-tmp*")


def abstract(state: Any) -> Any:
    """The state's tree of shapes, dtypes and shardings, holding no memory: what `load` takes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def prepare(directory: Path) -> None:
    """Makes the directory, removes what a killed save left, and shows that it can be written to.

    Raises CheckpointError if it cannot.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for pattern in TEMPORARY:
            for stale in directory.glob(pattern):
                log.warning("removing %s, left by an unfinished save", stale.name)
                shutil.rmtree(stale)
        probe = directory / f"tmp-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {directory}: {error}") from error


def save(directory: Path, step: int, state: Any, host: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Saves the arrays of `state` and the JSON value `host`, then removes all but the `keep` newest
    checkpoints.

    If a complete checkpoint of this step is there already, it stays as it is. Raises CheckpointError if it
    cannot be written, at once; earlier ones are then untouched.
    """
    target, temporary = directory / f"{step:08d}", directory / f"tmp-{step:08d}-{os.getpid()}"
    prepare(directory)
    if target.exists() and broken(target) is None:
        return target
    try:
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        described = [_describe(path, x) for path, x in leaves]
        temporary.mkdir()
        _write_arrays(temporary / "arrays", {f"{i:05d}": _data(x) for i, (_, x) in enumerate(leaves)})
        (temporary / "host.json").write_text(json.dumps(host, indent=1))
        manifest = {
            "step": step,
            "leaves": described,
            "files": {
                str(file.relative_to(temporary)): {
                    "bytes": file.stat().st_size,
                    "sha256": _sha256(file, sync=True),
                }
                for file in sorted(temporary.rglob("*"))
                if file.is_file()
            },
        }
        path = temporary / "manifest.json"
        path.write_text(json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1))
        _sha256(path, sync=True)
        if target.exists():  # a broken one
            shutil.rmtree(target)
        temporary.rename(target)
        _sync_directory(directory)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {directory}: {error}. "
            f"Earlier checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in [p for p in _found(directory) if (p / "manifest.json").exists() and p != target][
        max(0, keep - 1) :
    ]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(directory: Path, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
    """The newest complete checkpoint: (step, state, host), or None if there is no checkpoint at all.

    `like` is an `abstract` state: its shardings, which may be of another mesh than the one it was saved on,
    are those of the result. Broken checkpoints are skipped, each with a sentence in the log. Raises
    CheckpointError if there are checkpoints and none is complete, InputError if the complete one holds other
    arrays than `like`.
    """
    reasons = []
    for path in _found(directory):
        reason = broken(path)
        if reason is None:
            manifest = json.loads((path / "manifest.json").read_text())
            host = json.loads((path / "host.json").read_text())
            return manifest["step"], _restore(path, manifest["leaves"], like), host
        reasons.append(f"checkpoint {path.name} is skipped: {reason}")
        log.warning("%s", reasons[-1])
    if reasons:
        raise CheckpointError(f"no checkpoint in {directory} is complete. " + "; ".join(reasons))
    return None


def steps(directory: Path) -> list[int]:
    """The steps that have a checkpoint, newest first, complete or not."""
    return [int(p.name) for p in _found(directory)]


def newest(directory: Path) -> int | None:
    """The step of the newest complete checkpoint, None if there is none."""
    return next((int(p.name) for p in _found(directory) if broken(p) is None), None)


def broken(path: Path) -> str | None:
    """What is wrong with a checkpoint, in a sentence; None if it is complete and every byte as it was
    written."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        digest = manifest.pop("sha256")
        if digest != _digest(manifest):
            return "its manifest was altered"
        if f"{manifest['step']:08d}" != path.name:
            return f"it is a copy of step {manifest['step']} under another name"
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}"
            if _sha256(file) != expected["sha256"]:
                return f"{name} was altered"
    except FileNotFoundError:
        return "it has no manifest, so it was never finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return None


def _found(directory: Path) -> list[Path]:
    """Step directories, newest first, complete or not."""
    if not directory.is_dir():
        return []
    return sorted((p for p in directory.iterdir() if STEP.fullmatch(p.name)), reverse=True)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if _is_key(x) else x


def _describe(path: Any, x: jax.Array) -> dict[str, Any]:
    if x.size == 0:
        raise InputError(f"{jax.tree_util.keystr(path)} {x.shape} has no elements")
    kind = {"key": str(jax.random.key_impl(x))} if _is_key(x) else {}
    return {"path": jax.tree_util.keystr(path), "shape": list(x.shape), "dtype": str(x.dtype)} | kind


def _checkpointer(leaves: Mapping[str, Any]) -> ocp.Checkpointer:
    # GB in flight: no second copy of a large state in memory, but room for its largest array.
    room = math.ceil(1.1e-9 * max(math.prod(x.shape) * x.dtype.itemsize for x in leaves.values()))
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(save_concurrent_gb=room, restore_concurrent_gb=room))


def _write_arrays(path: Path, arrays: Mapping[str, jax.Array]) -> None:
    with _checkpointer(arrays) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays)))


def _restore(path: Path, described: list[dict[str, Any]], like: Any) -> Any:
    wanted, tree = jax.tree_util.tree_flatten_with_path(like)
    have = {d["path"]: (d["dtype"], d["shape"]) for d in described}
    want = {jax.tree_util.keystr(p): x for p, x in wanted}
    if list(have) != list(want):
        names = sorted(set(have) ^ set(want))[:3] or ["their order"]
        raise InputError(
            f"checkpoint {path} holds other arrays than this run: {', '.join(names)}. Is it of this model?"
        )
    for name, x in want.items():
        (dtype, shape), mine = have[name], (str(x.dtype), list(x.shape))
        if (dtype, shape) != mine:
            raise InputError(
                f"checkpoint {path} holds {name} as {dtype}{shape}, this run wants {mine[0]}{mine[1]}. "
                f"Is it of this model?"
            )
    leaves = [x for _, x in wanted]
    targets = {
        f"{i:05d}": jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x for i, x in enumerate(leaves)
    }
    targets = {
        name: jax.ShapeDtypeStruct(
            t.shape, t.dtype, sharding=_plain(x.sharding) if _is_key(x) else x.sharding
        )
        for (name, t), x in zip(targets.items(), leaves, strict=True)
    }
    with _checkpointer(targets) as checkpointer:
        arguments = ocp.checkpoint_utils.construct_restore_args(targets)
        restored = checkpointer.restore(
            (path / "arrays").absolute(), args=ocp.args.PyTreeRestore(item=targets, restore_args=arguments)
        )
    values = [
        jax.device_put(jax.random.wrap_key_data(restored[name], impl=d["key"]), x.sharding)
        if _is_key(x)
        else restored[name]
        for (name, x, d) in zip(targets, leaves, described, strict=True)
    ]
    return jax.tree_util.tree_unflatten(tree, values)


def _plain(sharding: Any) -> Any:
    """Where a key's data goes before it is a key again: whole on every device."""
    return NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding


def _digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path, *, sync: bool = False) -> str:
    with file.open("rb") as stream:
        if sync:
            os.fsync(stream.fileno())
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
