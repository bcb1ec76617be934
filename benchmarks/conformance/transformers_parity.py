"""Our logits against those of Hugging Face transformers.

    python transformers_parity.py golden OUT.npz            (in a venv with torch and transformers)
        writes the numbers that tests/models/parity_test.py compares with
    python transformers_parity.py check --peer PYTHON       (in our venv; PYTHON is that other venv's)
        compares directly, tiny models and SmolLM2 as we converted it, and fails beyond 1e-5

Weights are a function of a seed, so that nothing large has to be kept: see `random_weights`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

TOLERANCE = 1e-5  # of the largest logit

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


def random_weights(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Hugging Face tensors of a config, drawn in the order of the keys below."""
    rng = np.random.default_rng(seed)
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

    def draw(name: str, s: tuple[int, ...]) -> np.ndarray:
        x = rng.normal(size=s)
        return (x * s[-1] ** -0.5 if len(s) == 2 else x / 2 if name.endswith("bias") else 1 + x / 4).astype(
            "f4"
        )

    return {name: draw(name, s) for name, s in shapes.items()}


def write_directory(directory: Path, config: dict[str, Any], seed: int) -> None:
    """A Hugging Face directory of a random model."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})


def random_tokens(config: dict[str, Any], seed: int, shape: tuple[int, ...] = (2, 150)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config["vocab_size"], shape).astype(np.int32)


def transformers_logits(directory: Path, tokens: np.ndarray) -> np.ndarray:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def golden(out: Path) -> None:
    arrays: dict[str, np.ndarray] = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        with tempfile.TemporaryDirectory() as directory:
            write_directory(Path(directory), config, seed)
            tokens = random_tokens(config, seed)
            arrays[f"{name}/config"] = np.asarray(json.dumps(config))
            arrays[f"{name}/seed"] = np.asarray(seed)
            arrays[f"{name}/tokens"] = tokens
            arrays[f"{name}/logits"] = transformers_logits(Path(directory), tokens)[
                :, ::7
            ]  # every 7th position
    np.savez_compressed(out, **arrays)
    print(f"wrote {out} ({out.stat().st_size / 1e3:.0f} kB)")


def check(peer: str) -> bool:
    import jax.numpy as jnp

    from metagym.models import load, save

    def ours(model: Any, tokens: np.ndarray) -> np.ndarray:
        positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
        hidden = model.hidden(jnp.asarray(tokens), jnp.asarray(positions), jnp.ones_like(jnp.asarray(tokens)))
        return np.asarray(model.logits(hidden))

    passed = True
    with tempfile.TemporaryDirectory() as scratch:
        cases: dict[str, tuple[Path, np.ndarray]] = {}
        for seed, (name, config) in enumerate(CONFIGS.items()):
            made = Path(scratch, name)
            write_directory(made, config, seed + 100)
            tokens = random_tokens(config, seed)
            cases[name] = made, tokens
            cases[f"{name}, saved by us"] = save(load(made)[0], Path(scratch, f"{name}-saved")), tokens
        real = load("smollm2-135m")[1]
        cases["SmolLM2-135M"] = (
            real,
            random_tokens(json.loads((real / "config.json").read_text()), 0, (2, 200)),
        )
        for name, (directory, tokens) in cases.items():
            files = Path(scratch, "tokens.npy"), Path(scratch, "logits.npy")
            np.save(files[0], tokens)
            subprocess.run([peer, __file__, "logits", directory, *files], check=True)
            theirs = np.load(files[1])
            error = np.abs(ours(load(directory)[0], tokens) - theirs).max() / np.abs(theirs).max()
            passed &= bool(error <= TOLERANCE)
            print(
                f"{'ok  ' if error <= TOLERANCE else 'FAIL'} {name}: {error:.2e} of the largest logit",
                flush=True,
            )
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("golden").add_argument("out", type=Path)
    logits = commands.add_parser("logits")
    for name in ("directory", "tokens", "out"):
        logits.add_argument(name, type=Path)
    commands.add_parser("check").add_argument(
        "--peer", required=True, help="python with torch and transformers"
    )
    args = parser.parse_args()
    if args.command == "check":
        return 0 if check(args.peer) else 1
    if args.command == "golden":
        golden(args.out)
    else:
        np.save(args.out, transformers_logits(args.directory, np.load(args.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
