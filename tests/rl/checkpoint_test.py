"""Checkpoints: bit-equal on any mesh, and broken ones recognised."""

import gc
import json
import logging
import os
import resource
import shutil
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from metagym.errors import CheckpointError, InputError
from metagym.rl.checkpoint import abstract, broken, load, save


def state_on(mesh):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    rng = np.random.default_rng(0)
    return {
        "w": put(rng.normal(size=(16, 8)).astype(np.float32), "fsdp", "data"),
        "half": put(jnp.asarray(rng.normal(size=(8, 4)), jnp.bfloat16), "data"),
        "count": put(np.int32(7)),
        "nested": [put(np.arange(8, dtype=np.uint32), ("data", "fsdp")), put(np.array([True, False]))],
        "rng": put(jax.random.key(5)),
        "old_style": put(jax.random.split(jax.random.key(1, impl="rbg"), 2)),
    }


def host(tree):
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
    for x, y in zip(host(a), host(b), strict=True):
        assert x.tobytes() == y.tobytes()


@pytest.fixture
def failing_saves():
    """For tests in which orbax fails: what it leaves behind is collected, and warned of, here and not in
    another test."""
    gc.collect()
    yield
    with warnings.catch_warnings(action="ignore"):
        gc.collect()


orbax_fails = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def small(value=0.0):
    return {"x": jnp.full((4,), float(value)), "n": jnp.int32(value)}


def test_restored_on_other_meshes_bit_for_bit(tiny, tmp_path):
    saved = state_on(tiny.make_mesh(4, 2))
    save(tmp_path, 3, saved, {"cursor": 9})
    for shape in ((4, 2), (1, 1), (2, 4), (8, 1)):
        like = abstract(state_on(tiny.make_mesh(*shape)))
        found = load(tmp_path, like)
        assert found is not None
        step, restored, extra = found
        assert (step, extra) == (3, {"cursor": 9})
        assert_same(saved, restored)
        for x, y in zip(jax.tree.leaves(like), jax.tree.leaves(restored), strict=True):
            assert x.sharding == y.sharding
        np.testing.assert_array_equal(jax.random.normal(restored["rng"]), jax.random.normal(saved["rng"]))


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_the_axis_types_are_those_of_the_run_that_loads(tmp_path, kind):
    def on(kind):
        mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(kind,) * 2)
        x = np.arange(64, dtype=np.float32).reshape(8, 8)
        return {"x": jax.device_put(x, NamedSharding(mesh, P("data", "fsdp")))}

    saved, like = on(AxisType.Explicit), abstract(on(kind))
    save(tmp_path, 1, saved, {})
    found = load(tmp_path, like)
    assert found is not None
    assert_same(saved, found[1])
    assert found[1]["x"].sharding == like["x"].sharding
    assert found[1]["x"].sharding.mesh.axis_types == (kind,) * 2


@pytest.mark.parametrize("dtype", ["int4", "int8", "uint8", "int16", "float16", "bfloat16", "float8_e4m3fn"])
def test_small_dtypes_survive(tmp_path, dtype):
    state = {"x": jnp.arange(6).reshape(2, 3).astype(dtype), "n": jnp.ones((), dtype)}
    save(tmp_path, 1, state, {})
    found = load(tmp_path, abstract(state))
    assert found is not None
    assert_same(state, found[1])


@orbax_fails
def test_a_dtype_that_cannot_be_stored_is_refused(tmp_path, failing_saves):
    with pytest.raises(CheckpointError, match="uint4"):
        save(tmp_path, 1, {"x": jnp.zeros(4, "uint4")}, {})
    assert list(tmp_path.iterdir()) == []


def test_newest_are_kept(tmp_path):
    for step in range(1, 5):
        save(tmp_path, step, small(step), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000003", "00000004"]


def test_no_checkpoint_is_none(tmp_path):
    assert load(tmp_path, abstract(small())) is None
    assert load(tmp_path / "absent", abstract(small())) is None


def truncate(path):
    file = next((path / "arrays").rglob("manifest.ocdbt"))
    file.write_bytes(file.read_bytes()[:-1])


def flip(path):
    file = max((p for p in (path / "arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def lose(path):
    next((path / "arrays").rglob("manifest.ocdbt")).unlink()


def unfinished(path):
    (path / "manifest.json").unlink()


def forged(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] = {}
    (path / "manifest.json").write_text(json.dumps(manifest))


def halved(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text[: len(text) // 2])


def copied(path):
    shutil.rmtree(path)
    shutil.copytree(path.with_name("00000001"), path)


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (truncate, "bytes, not"),
        (flip, "was altered"),
        (lose, "is missing"),
        (unfinished, "never finished"),
        (forged, "manifest was altered"),
        (halved, "cannot be read"),
        (copied, "copy of step 1 under another name"),
    ],
)
def test_a_broken_checkpoint_is_skipped_with_a_sentence(tmp_path, caplog, harm, sentence):
    for step in (1, 2):
        save(tmp_path, step, small(step), {"step": step})
    harm(tmp_path / "00000002")
    with caplog.at_level(logging.WARNING):
        found = load(tmp_path, abstract(small()))
    assert found is not None
    assert found[0] == 1
    assert_same(found[1], small(1))
    assert "checkpoint 00000002 is skipped: " in caplog.text
    assert sentence in caplog.text
    save(tmp_path, 2, small(2), {})  # the run comes there again: the broken one is replaced
    assert broken(tmp_path / "00000002") is None


def test_all_broken_is_an_error_and_not_a_fresh_start(tmp_path):
    save(tmp_path, 1, small(), {})
    flip(tmp_path / "00000001")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        load(tmp_path, abstract(small()))


def test_a_good_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 1, small(1), {"a": 1})
    save(tmp_path, 1, small(2), {"a": 2})
    found = load(tmp_path, abstract(small()))
    assert found is not None
    assert found[2] == {"a": 1}
    assert_same(found[1], small(1))


def test_what_a_killed_save_left_is_removed(tmp_path):
    for name in ("tmp-00000002-123", "2.orbax-checkpoint-tmp-0", "00000002.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("x")
    save(tmp_path, 2, small(2), {})
    assert [p.name for p in tmp_path.iterdir()] == ["00000002"]


@orbax_fails
def test_a_full_disk_is_an_error_at_once_and_loses_nothing(tmp_path, failing_saves):
    save(tmp_path, 1, small(1), {})
    big = {
        "x": jnp.asarray(np.random.default_rng(0).normal(size=(256, 1024)), jnp.float32),
        "n": jnp.int32(0),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (100_000, limits[1])
    )  # a write beyond this fails as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"(?s)step 2 could not be written.*untouched"):
            save(tmp_path, 2, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    found = load(tmp_path, abstract(small()))
    assert found is not None
    assert_same(found[1], small(1))


@pytest.fixture
def open_to_all():
    """A directory that other users may enter."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def test_a_read_only_directory_is_an_error_at_once_and_loses_nothing(open_to_all):
    save(open_to_all, 1, small(1), {})
    root = os.geteuid() == 0
    os.chmod(open_to_all, 0o555)
    if root:  # whom permissions do not hold
        os.seteuid(65534)
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written to .*Permission denied"):
            save(open_to_all, 2, small(2), {})
    finally:
        if root:
            os.seteuid(0)
        os.chmod(open_to_all, 0o755)
    assert [p.name for p in open_to_all.iterdir()] == ["00000001"]
    assert broken(open_to_all / "00000001") is None


def test_a_directory_that_cannot_be_written_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file" / "checkpoints", 1, small(), {})


def test_other_arrays_are_refused_by_name(tmp_path):
    save(tmp_path, 1, small(), {})
    with pytest.raises(InputError, match=r"\['x'\] as float32\[4\], this run wants float32\[5\]"):
        load(tmp_path, abstract({"x": jnp.zeros(5), "n": jnp.int32(0)}))
    with pytest.raises(InputError, match=r"\['y'\]"):
        load(tmp_path, abstract(small() | {"y": jnp.zeros(1)}))
    with pytest.raises(CheckpointError, match="no elements"):
        save(tmp_path, 2, {"x": jnp.zeros((0, 3))}, {})
