"""Our logits against those of Hugging Face transformers, and of PEFT for adapters.

    python transformers_parity.py golden OUT.npz            (in a venv with torch, transformers and peft)
        writes the numbers that tests/models/parity_test.py compares with
    python transformers_parity.py check --peer PYTHON       (in our venv; PYTHON is that other venv's)
        compares directly: tiny models, what we save of them, adapters that we save, and SmolLM2 as we
        converted it, each with rows whole, padded on either side and packed; fails beyond 1e-5

Weights are a function of a seed, so that nothing large has to be kept: see `random_weights`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TOLERANCE = 1e-5  # of the largest logit
EVERY = 19  # tokens, of those whose logits are kept

_BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm2": {
        **_BASE,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "llama3": {
        **_BASE,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
}
_QWEN = {k: v for k, v in _BASE.items() if k not in ("attention_bias", "mlp_bias")} | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS |= {
    "qwen2": {
        **_QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
    },
    "qwen2.5 with yarn": {
        **_QWEN,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 6,
        "max_position_embeddings": 64,
        "rope_scaling": _YARN,
        "tie_word_embeddings": False,
    },
    "qwen3": {
        **_QWEN,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_scaling": _YARN,
        "tie_word_embeddings": False,
    },
    "qwen3 moe": {
        **_QWEN,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}


def random_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every Hugging Face tensor of a config."""
    D, F, V, kind = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
        config["model_type"],
    )
    h = config.get("head_dim") or D // config["num_attention_heads"]
    H, K = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}

    def mlp(prefix: str, F: int) -> None:
        for name, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            shapes[f"{prefix}.{name}_proj.weight"] = shape

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, shape in (("q", (H, D)), ("k", (K, D)), ("v", (K, D)), ("o", (D, H))):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = shape
            if kind == "qwen2" and name != "o":
                shapes[f"{layer}self_attn.{name}_proj.bias"] = shape[:1]
        if kind.startswith("qwen3"):
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (h,)
        if kind == "qwen3_moe":
            shapes[layer + "mlp.gate.weight"] = (config["num_experts"], D)
            for e in range(config["num_experts"]):
                mlp(f"{layer}mlp.experts.{e}", config["moe_intermediate_size"])
        else:
            mlp(f"{layer}mlp", F)
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (D,)
    shapes["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Hugging Face tensors of a config, drawn in the order of `random_shapes`."""
    rng = np.random.default_rng(seed)

    def draw(name: str, s: tuple[int, ...]) -> np.ndarray:
        x = rng.normal(size=s)
        return (x * s[-1] ** -0.5 if len(s) == 2 else x / 2 if name.endswith("bias") else 1 + x / 4).astype(
            "f4"
        )

    return {name: draw(name, s) for name, s in random_shapes(config).items()}


def write_directory(directory: Path, config: dict[str, Any], seed: int) -> None:
    """A Hugging Face directory of a random model."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})


# Adapters, as PEFT saves them: of the config of this name, on these matrices
ADAPTERS = {
    "qwen2": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3 moe": ("q_proj", "v_proj", "o_proj"),
}
RANK, ALPHA = 3, 6.0


def write_adapter(directory: Path, config: dict[str, Any], targets: tuple[str, ...], seed: int) -> None:
    """A directory of PEFT's with a random adapter."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    tensors = {}
    for name, size in random_shapes(config).items():
        if name.split(".")[-2] not in targets or len(size) == 1:
            continue
        out, into = size
        for letter, shape in (("A", (RANK, into)), ("B", (out, RANK))):
            x = rng.normal(size=shape) * (into if letter == "A" else RANK) ** -0.5 / 2
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_{letter}.weight"
            tensors[key] = x.astype("f4")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(about))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def random_tokens(config: dict[str, Any], seed: int, shape: tuple[int, ...] = (2, 150)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config["vocab_size"], shape).astype(np.int32)


class Layout(NamedTuple):
    """Rows as a model reads them, i32 `[B, L]` each. Segment 0 is padding."""

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray


def layouts(tokens: np.ndarray) -> dict[str, Layout]:
    """Two rows `[2, L]`: whole; the second one shorter and padded, right or left; both in one row, padded."""
    B, L = tokens.shape
    n = 3 * L // 5
    count = np.tile(np.arange(L, dtype=np.int32), (B, 1))
    right, left = (np.ones((B, L), np.int32) for _ in range(2))
    right[1, n:], left[1, : L - n] = 0, 0
    shifted = count.copy()
    shifted[1] = np.maximum(count[1] - (L - n), 0)
    one = Layout(*(np.concatenate([x[0], y[1, :n]])[None] for x, y in (
        (tokens, tokens), (count, count), (np.ones_like(count), np.full_like(count, 2)),
    )))  # fmt: skip
    return {
        "whole": Layout(tokens, count, np.ones_like(count)),
        "padded right": Layout(tokens, count, right),
        "padded left": Layout(tokens, shifted, left),
        "packed": one,
    }


# In the venv with torch


def peer_logits(directory: Path, adapter: Path | None, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """By layout, `[real tokens, V]`. Padding is what the attention mask says; rows are packed by position."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    if adapter is not None:
        from peft import PeftModel  # pyright: ignore[reportMissingImports]

        model = PeftModel.from_pretrained(model, adapter)
    found = {}
    for name, layout in layouts(tokens).items():
        ids, positions, segments = (torch.from_numpy(x.astype(np.int64)) for x in layout)
        mask = segments if name.startswith("padded") else None
        with torch.no_grad():
            out = model.eval()(ids, attention_mask=mask, position_ids=positions, use_cache=False)
        found[name] = out.logits.numpy()[layout.segments > 0]
    return found


def golden(out: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        with tempfile.TemporaryDirectory() as scratch:
            base, adapter = Path(scratch, "base"), Path(scratch, "adapter")
            write_directory(base, config, seed)
            cases: dict[str, Path | None] = {name: None}
            if name in ADAPTERS:
                write_adapter(adapter, config, ADAPTERS[name], seed)
                cases[f"{name} with an adapter"] = adapter
            for case, at in cases.items():
                tokens = random_tokens(config, seed)
                arrays[f"{case}/config"] = np.asarray(json.dumps(config))
                arrays[f"{case}/seed"] = np.asarray(seed)
                arrays[f"{case}/tokens"] = tokens
                for layout, logits in peer_logits(base, at, tokens).items():
                    arrays[f"{case}/{layout}"] = logits[::EVERY]
    np.savez_compressed(out, **arrays)
    print(f"wrote {out} ({out.stat().st_size / 1e3:.0f} kB)")


def answer(scratch: Path) -> None:
    """The logits of every case in `scratch`, which `check` wrote."""
    for name, (directory, adapter) in json.loads((scratch / "cases.json").read_text()).items():
        tokens = np.load(scratch / f"{name}.npy")
        np.savez(scratch / f"{name}.npz", **peer_logits(directory, adapter, tokens))


# In ours


def our_logits(model: Any, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """By layout, `[real tokens, V]`."""
    import jax
    from flax import nnx

    graphdef, params = nnx.split(model)

    @jax.jit
    def logits(params: Any, *rows: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)
        return model.logits(model.hidden(*rows))

    rows = layouts(tokens)
    return {name: np.asarray(logits(params, *x))[x.segments > 0] for name, x in rows.items()}


def check(peer: str) -> bool:
    from metagym.models import Lora, load, load_adapter, save, save_adapter

    passed = True
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        cases: dict[str, tuple[Any, Path, Path | None, np.ndarray]] = {}  # our model, what they load, tokens
        for seed, (name, config) in enumerate(CONFIGS.items()):
            made = scratch / f"{name}-made"
            write_directory(made, config, seed + 100)
            model, tokens = load(made)[0], random_tokens(config, seed)
            cases[name] = model, made, None, tokens
            saved = save(model, scratch / f"{name}-saved")
            cases[f"{name}, saved by us"] = load(saved)[0], saved, None, tokens
            if name in ADAPTERS:
                write_adapter(scratch / f"{name}-adapter", config, ADAPTERS[name], seed)
                adapted = load(made, lora=Lora(RANK, ALPHA, ADAPTERS[name]))[0]
                load_adapter(adapted, scratch / f"{name}-adapter")
                ours = save_adapter(adapted, scratch / f"{name}-adapter-saved", base=str(made))
                cases[f"{name}, an adapter saved by us"] = adapted, made, ours, tokens
                merged = save(adapted, scratch / f"{name}-merged")
                cases[f"{name}, an adapter merged by us"] = load(merged)[0], merged, None, tokens
        model, real = load("smollm2-135m")
        config = json.loads((real / "config.json").read_text())
        cases["SmolLM2-135M"] = model, real, None, random_tokens(config, 0, (2, 200))
        asked = {name: (str(base), adapter and str(adapter)) for name, (_, base, adapter, _) in cases.items()}
        (scratch / "cases.json").write_text(json.dumps(asked))
        for name, (*_, tokens) in cases.items():
            np.save(scratch / f"{name}.npy", tokens)
        subprocess.run([peer, __file__, "answer", scratch], check=True)
        for name, (model, *_, tokens) in cases.items():
            theirs, errors = np.load(scratch / f"{name}.npz"), {}
            for layout, got in our_logits(model, tokens).items():
                errors[layout] = np.abs(got - theirs[layout]).max() / np.abs(theirs[layout]).max()
            good = max(errors.values()) <= TOLERANCE
            passed &= bool(good)
            what = ", ".join(f"{layout} {error:.1e}" for layout, error in errors.items())
            print(f"{'ok  ' if good else 'FAIL'} {name}: {what}", flush=True)
    print(f"differences are shares of the largest logit; {TOLERANCE:.0e} is allowed")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("golden").add_argument("out", type=Path)
    commands.add_parser("answer").add_argument("scratch", type=Path)
    commands.add_parser("check").add_argument(
        "--peer", required=True, help="python with torch, transformers and peft"
    )
    args = parser.parse_args()
    if args.command == "check":
        return 0 if check(args.peer) else 1
    if args.command == "golden":
        golden(args.out)
    else:
        answer(args.scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
