"""Weights in and out: Hugging Face directories, hub ids and packaged models.

model, directory = load("smollm2-135m")
save(model, "out", source=directory)
"""

import dataclasses
import difflib
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from metagym.models import sharding
from metagym.models.config import Lora, ModelConfig, stretched
from metagym.models.decoder import Decoder
from metagym.models.errors import ModelError
from metagym.models.families import family
from metagym.models.lora import draw, merge
from metagym.models.packaged import PACKAGED, packaged_directory
from metagym.models.tensors import Index, Recipe

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
SHARD_BYTES = 5_000_000_000  # of a saved file, as transformers does
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def load(
    name: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: Any = jnp.float32,
    yarn: float = 0.0,
    lora: Lora | None = None,
) -> tuple[Decoder, Path]:
    """A model with its weights, and the Hugging Face directory that they, the tokenizer and the template are
    in.

    `name`: a packaged model ("smollm2-135m"), a directory with config.json and safetensors, or a hub id
    "owner/name". `dtype` is what the parameters are kept in; training wants f32. With a mesh each device
    reads only its own shards. `yarn`: see `stretched`; `lora`: a new adapter. Raises ModelError
    if there is no such model, or its files are not a whole model.
    """
    directory = resolve(name)
    config = stretched(ModelConfig.from_file(directory / "config.json"), yarn)
    config = dataclasses.replace(config, lora=lora)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config)))
    one = SingleDeviceSharding(jax.devices()[0])
    shardings = sharding.param_shardings(shapes, mesh) if mesh else jax.tree.map(lambda _: one, shapes)
    recipes = _recipes(config)
    with _Reader(directory) as reader:
        reader.check(config)

        def leaf(path: Any, shape: jax.ShapeDtypeStruct, where: jax.sharding.Sharding) -> jax.Array:
            name = ".".join(str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey))
            if name not in recipes:  # of the adapter
                return jax.device_put(draw(name, shape.shape).astype(dtype), where)
            recipe = recipes[name]
            return jax.make_array_from_callback(
                shape.shape,
                where,
                lambda index: recipe.read(reader.slice, index or (), shape.shape, dtype),
            )

        params = jax.tree_util.tree_map_with_path(leaf, shapes, shardings)
    return nnx.merge(graphdef, params), directory


def resolve(name: str | Path) -> Path:
    """The local directory of a model; see `load`. Fetches or converts it if need be."""
    if (text := str(name)) in PACKAGED:
        return packaged_directory(text)
    if (path := Path(name).expanduser()).is_dir():
        return path
    if _HUB_ID.fullmatch(text) and not path.exists():
        return _from_hub(text)
    known = sorted(PACKAGED)
    near = difflib.get_close_matches(text, known, n=1)
    raise ModelError(
        f"unknown model {text!r}. Did you mean {(near or known)[0]!r}? Known: {', '.join(known)}; "
        "a directory in Hugging Face layout or a hub id 'owner/name' works too."
    )


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        wanted = ["*.safetensors", INDEX, "config.json", *SIDE_FILES]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as e:  # the client raises errors of its HTTP library and of its own
        raise ModelError(
            f"cannot fetch {name!r} from the Hugging Face hub ({type(e).__name__}: {e}). Check the id and "
            f"the connection, or pass a local directory; packaged: {', '.join(sorted(PACKAGED))}"
        ) from e


def _recipes(config: ModelConfig) -> dict[str, Recipe]:
    """By the parameter's path in the module."""
    return family(config.model_type, "config").recipes(config)


# Reading


class _Reader:
    """The safetensors of a directory, opened lazily, read in slices."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.files: dict[str, Any] = {}
        self.where: dict[str, Path] = {}  # tensor -> file
        if (index := directory / INDEX).is_file():
            try:
                weight_map = json.loads(index.read_text())["weight_map"]
                self.where = {tensor: directory / file for tensor, file in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                raise ModelError(f"{index} is no safetensors index with a 'weight_map': {e!r}") from e
            for file in sorted(set(self.where.values())):
                self._open(file)
        else:
            single = directory / SINGLE
            self.where = dict.fromkeys(self._open(single).keys(), single)

    def _open(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            handle = self.files[str(path)] = safe_open(path, framework="np")
        except FileNotFoundError:
            also = " (PyTorch .bin files are not read)" if list(self.directory.glob("*.bin")) else ""
            raise ModelError(f"{path} does not exist{also}") from None
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{path} is broken or truncated: {e}. Fetch or write it again.") from e
        return handle

    def _slice(self, tensor: str) -> Any:
        from safetensors import SafetensorError

        if tensor not in self.where:
            raise ModelError(f"{self.directory}: the tensor {tensor!r} is in none of its files")
        path = self.where[tensor]
        try:
            return self.files[str(path)].get_slice(tensor)
        except SafetensorError:
            raise ModelError(f"{path}: the tensor {tensor!r} is missing; {INDEX} says it is there") from None

    def check(self, config: ModelConfig) -> None:
        """Raises ModelError unless every tensor of such a model is there in its shape."""
        for recipe in _recipes(config).values():
            for name, shape in zip(recipe.names, recipe.shapes, strict=True):
                for numbers in recipe.numbers():
                    tensor = name.format(*numbers)
                    found = self._slice(tensor)
                    problem = None
                    if tuple(found.get_shape()) != shape:
                        problem = f"has shape {tuple(found.get_shape())}; config.json asks for {shape}"
                    elif found.get_dtype() not in ("F32", "F16", "BF16", "F64"):
                        problem = f"is {found.get_dtype()}; quantised weights are not supported"
                    if problem:
                        raise ModelError(f"{self.where[tensor]}: the tensor {tensor!r} {problem}")

    def slice(self, tensor: str, index: Index) -> np.ndarray:
        found = self._slice(tensor)
        return np.asarray(found[index or slice(None)])

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()


# Writing


def save(
    model: Decoder, directory: str | Path, *, source: str | Path | None = None, dtype: Any = jnp.float32
) -> Path:
    """Writes `model` as a Hugging Face directory, which transformers and SGLang load; returns it.

    An adapter is added to the weights, in a copy of them; without one, the parts of one layer's parameter
    are gathered at a time. `source` is the directory whose tokenizer, template and generation config go
    along. `dtype` is the type of the saved weights. The directory appears whole or not at all. Raises
    FileExistsError if it exists already.
    """
    target = Path(directory)
    if target.exists():
        raise FileExistsError(f"{target} exists already; save to a new directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        files: list[list[Tensor]] = [[]]
        size = 0
        for tensor in named_tensors(model):
            nbytes = int(np.prod(tensor.shape)) * np.dtype(dtype).itemsize
            if files[-1] and size + nbytes > SHARD_BYTES:
                files.append([])
                size = 0
            size += nbytes
            files[-1].append(tensor)
        weight_map: dict[str, str] = {}
        for i, tensors in enumerate(files):
            file = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
            _write(work / file, tensors, np.dtype(dtype))
            weight_map |= dict.fromkeys((t.name for t in tensors), file)
        if len(files) > 1:
            (work / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
        config = {**model.config.to_dict(), "torch_dtype": np.dtype(dtype).name}
        if source is not None:
            old = json.loads((Path(source) / "config.json").read_text())
            config |= {k: v for k, v in old.items() if k.endswith("_token_id")}
            for file in SIDE_FILES:
                if (Path(source) / file).is_file():
                    shutil.copyfile(Path(source) / file, work / file)
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        work.chmod(0o755)
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


class Tensor(NamedTuple):
    """A tensor as Hugging Face has it. `read` brings it to the host."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def named_tensors(model: Decoder) -> list[Tensor]:
    """Every tensor of a model, its adapter added, in layer order. They are gathered when they are read."""
    model = merge(model)
    c = model.config
    params = {
        ".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))
    }
    recipes = _recipes(c)

    @functools.lru_cache(maxsize=1)  # the parts of one parameter follow each other
    def parts(path: str, at: tuple[int, ...]) -> Sequence[np.ndarray]:
        split = recipes[path].split
        return [np.asarray(params[path])] if split is None else split(np.asarray(params[path][at]))

    def read(path: str, at: tuple[int, ...], part: int) -> np.ndarray:
        return parts(path, at)[part]

    return [
        Tensor(name.format(*at), shape, functools.partial(read, path, at, part))
        for path, recipe in recipes.items()
        for at in recipe.numbers()
        for part, (name, shape) in enumerate(zip(recipe.names, recipe.shapes, strict=True))
    ]


def _write(path: Path, tensors: Sequence[Tensor], dtype: np.dtype) -> None:
    """Writes a safetensors file, with one tensor in memory at a time."""
    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype.name]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + int(np.prod(tensor.shape)) * dtype.itemsize
        header[tensor.name] = {"dtype": kind, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            whole = np.ascontiguousarray(tensor.read().astype(dtype, copy=False))
            whole.reshape(-1).view(np.uint8).tofile(file)
