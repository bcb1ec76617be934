"""`metagym export RUN OUT`: the newest checkpoint of a run as a Hugging Face directory."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metagym.errors import CheckpointError, InputError
from metagym.experiments.config import Config, base, fields


def read(run: Path) -> Config:
    """The config that a run recorded. Raises InputError where there is none, or one of another version."""
    path = run / "config.json"
    try:
        recorded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not the record of a run: {error}") from error
    config = base()
    with config.unlocked():
        for name, value in recorded.items():
            if isinstance(value, Mapping) and name in config:
                with config[name].unlocked():
                    config[name].update(value)
            else:
                config[name] = value
    if lacking := sorted(set(fields(base())) - set(fields(config))):
        raise InputError(
            f"{path} lacks the fields {', '.join(lacking)}: another version of MetaGym wrote it."
        )
    return config


def export(run: Path, out: Path, dtype: str = "float32") -> tuple[int, Path]:
    """Writes the policy of the run's newest complete checkpoint, with its tokenizer, to the new directory
    `out`; returns the step and `out`.

    Raises InputError for a run without a record and for an `out` that exists, CheckpointError where no
    checkpoint is complete.
    """
    import jax
    from flax import nnx

    from metagym.experiments import build
    from metagym.models import Decoder, make_mesh, param_shardings, resolve, save
    from metagym.rl import checkpoint
    from metagym.rl.train_step import abstract_state

    if out.exists():
        raise InputError(f"{out} exists already: name a new directory.")
    config = read(run)
    mesh = make_mesh((1, 1), devices=jax.devices()[:1])
    random = config.model.name == "random"
    directory = run / "random_model" if random else resolve(config.model.name)
    if random:
        config.model.name = str(directory)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Decoder(build.model_config(config))))

    def on(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    params = jax.tree.map(on, params, param_shardings(params, mesh))
    found = checkpoint.load(run / "checkpoints", abstract_state(params, build.build_optimizer(config), mesh))
    if found is None:
        raise CheckpointError(f"{run / 'checkpoints'} holds no complete checkpoint")
    step, state, _ = found
    return step, save(nnx.merge(graphdef, state.params), out, source=directory, dtype=build.dtype(dtype))


def command(arguments: Sequence[str]) -> int:
    """`metagym export`; returns the exit code."""
    parser = argparse.ArgumentParser(
        "metagym export",
        description="Writes a run's newest checkpoint as a Hugging Face directory: config.json, safetensors, "
        "tokenizer. transformers and SGLang load it, and so does config.model.name.",
    )
    parser.add_argument("run", type=Path, help="the run's directory, with config.json and checkpoints/")
    parser.add_argument("out", type=Path, help="the new directory")
    parser.add_argument("--dtype", default="float32", help="of the weights in the files: float32 or bfloat16")
    options = parser.parse_args(arguments)
    step, out = export(options.run, options.out, options.dtype)
    print(f"step {step} of {options.run} is in {out}")
    return 0
