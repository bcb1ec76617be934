"""What goes to an SGLang server, and what comes back: pure functions on JSON.

SGLang answers `/generate` with ids, and a triple (log-prob, id, text) for each. What is missing there, too
short, shifted or not a number is an EngineError with a reason; nothing is padded.
"""

import base64
import io
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from metagym.errors import EngineError
from metagym.types import Generation, Sampling

# What a server may have defaults of its own for: `--preferred-sampling-params` is overruled by what is sent.
NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,  # True would ignore our stop tokens too
    "skip_special_tokens": False,
    "spaces_between_special_tokens": True,
    "stop": None,
    "regex": None,
    "json_schema": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
}
NEWER: Mapping[str, Any] = {"stop_regex": None, "custom_params": None}  # sglang-jax does not know them
_LOWEST = -1e30  # SGLang writes the lowest float32 for a token of probability 0


class UnknownWeightsError(EngineError):
    """Tokens of weights that nobody pushed: the server was started anew, or another one pushed."""


def request(
    ids: Sequence[int],
    sampling: Sampling,
    *,
    rid: str,
    seed: int | None,
    neutral: Mapping[str, Any] = NEUTRAL,
    routing: bool = False,
    salt: str | None = None,
) -> dict[str, Any]:
    """The body of `/generate`. Log-probs are asked for from the last prompt token on: earlier, and SGLang
    would compute the cached part of the prompt again. `salt` keeps cached prefixes of one kind apart.
    Without a seed, a server with --enable-deterministic-inference gives every request the same."""
    s = sampling
    own: dict[str, Any] = {
        "max_new_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
        "stop_token_ids": list(s.stop_token_ids),
    }
    if seed is not None:
        own["sampling_seed"] = seed & 0x7FFFFFFFFFFFFFFF
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(ids),
        "sampling_params": {**neutral, **own},
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    if routing:
        body["return_routed_experts"] = True
    if salt is not None:
        body["cache_salt"] = salt
    return body


def aborted(answer: Any) -> str | None:
    """Why the server gave a generation up; None if it did not."""
    try:
        reason = answer["meta_info"]["finish_reason"]
        return str(reason.get("message", "no reason given")) if reason["type"] == "abort" else None
    except (KeyError, TypeError, AttributeError):
        return None


def generation(
    answer: Any,
    prompt: int,
    sampling: Sampling,
    versions: Mapping[str, int],
    experts: tuple[int, int] = (0, 0),
) -> tuple[Generation, bool]:
    """(what a server answered to `prompt` tokens, whether it ended by a token that is none of ours).

    versions: the server's labels of weights, and what versions they are. experts: (R, number of experts) of
    routing, if it was asked for. Raises EngineError for what can't be trained on.
    """
    try:
        meta, tokens = answer["meta_info"], answer["output_ids"]
        finish = meta["finish_reason"]["type"]
        count = len(tokens)
        tokens = np.asarray(tokens, np.int32).reshape(count)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"SGLang's answer has no ids, or no reason why it ended: {error!r}") from error
    if finish not in ("stop", "length"):
        raise EngineError(f"SGLang ended a generation by {finish!r}; stop and length can be trained on")
    if (read := meta.get("prompt_tokens")) != prompt:
        raise EngineError(f"SGLang read {read} prompt tokens of the {prompt} that were sent")
    if meta.get("completion_tokens", count) != count:
        raise EngineError(f"SGLang counts {meta['completion_tokens']} tokens and returned {count} ids")
    if not count:
        raise EngineError("SGLang returned no tokens")
    if count > sampling.max_tokens:
        raise EngineError(f"SGLang returned {count} tokens, more than the {sampling.max_tokens} asked for")
    logprobs = _logprobs(meta.get("output_token_logprobs"), tokens)
    version = _versions(meta, count, versions)
    routing = _routing(meta.get("routed_experts"), prompt, count, experts) if experts[0] else None
    ours = int(tokens[-1]) in sampling.stop_token_ids
    if finish == "length" and ours:  # the last token that was allowed is a stop token
        finish = "stop"
    made = Generation(
        tokens,
        logprobs,
        version,
        finish,
        *(() if routing is None else (routing[prompt:], routing[:prompt])),
    )
    return made, finish == "stop" and not ours


def _logprobs(rows: Any, tokens: np.ndarray) -> np.ndarray:
    """f32 `[T]`."""
    if not rows:
        raise EngineError(f"SGLang returned {len(tokens)} tokens without log-probs")
    if len(rows) != len(tokens):
        raise EngineError(f"SGLang returned {len(rows)} log-probs for {len(tokens)} tokens")
    try:
        ids = np.array([row[1] for row in rows], np.int64)
        values = [math.nan if row[0] is None else float(row[0]) for row in rows]
    except (IndexError, TypeError, ValueError) as error:
        raise EngineError(f"SGLang's log-probs can't be read: {error!r}") from error
    if not np.array_equal(ids, tokens):
        at = int(np.flatnonzero(ids != tokens)[0])
        raise EngineError(
            f"SGLang's log-probs are of other tokens (shifted?): token {at} is {tokens[at]}, "
            f"its log-prob is of {ids[at]}"
        )
    for at, value in enumerate(values):
        if not _LOWEST < value <= 1e-6:  # NaN is not
            raise EngineError(f"SGLang's log-prob {value} of token {at} is not a log-probability")
    return np.array(values, np.float32)


def _versions(meta: Mapping[str, Any], count: int, versions: Mapping[str, int]) -> np.ndarray:
    """i32 `[T]`: of the weights that sampled each token."""
    spans = meta.get("weight_versions") or [
        {"version": meta.get("weight_version", ""), "start": 0, "end": count}
    ]
    out, end = np.zeros(count, np.int32), 0
    for span in spans:
        label, start = str(span["version"]), int(span["start"])
        if label not in versions:
            known = ", ".join(map(repr, versions)) or "none"
            raise UnknownWeightsError(f"SGLang serves weights {label!r}, which were not pushed: {known}")
        if start != end:
            raise EngineError(f"SGLang's weight versions leave out or repeat tokens: {spans}")
        end = min(int(span["end"]), count)
        out[start:end] = versions[label]
    if end != count:
        raise EngineError(f"SGLang's weight versions leave out or repeat tokens: {spans}")
    return out


def _routing(text: Any, prompt: int, count: int, experts: tuple[int, int]) -> np.ndarray:
    """i32 `[prompt + T, R]`: the experts that reading each token took; -1 for the last, which nobody read."""
    width, number = experts
    if not text:
        raise EngineError("SGLang returned no routed experts; start it with --enable-return-routed-experts")
    try:
        found = np.frombuffer(base64.b64decode(text), np.int32)
    except ValueError as error:
        raise EngineError(f"SGLang's routed experts can't be read: {error}") from error
    rows = prompt + count - 1
    if found.size != rows * width:
        raise EngineError(
            f"SGLang returned {found.size} routed experts; {rows} tokens of {width} each were read"
        )
    if found.size and (found.min() < 0 or found.max() >= number):
        raise EngineError(f"SGLang's routed experts go beyond the {number} that there are")
    out = np.full((rows + 1, width), -1, np.int32)
    out[:-1] = found.reshape(rows, width)
    return out


# Tensors, as `/update_weights_from_tensor` takes them: a pickle of PyTorch's, written by hand, as PyTorch
# need not be installed here. SGLang's unpickler allows `torch._utils._rebuild_tensor_v2` and
# `torch.storage._load_from_bytes`, which reads a storage as `torch.save` writes it: a zip file.

_STORAGES = {"float32": "FloatStorage", "bfloat16": "BFloat16Storage", "float16": "HalfStorage"}


def pickled(tensors: Iterable[tuple[str, np.ndarray]]) -> bytes:
    """A pickle of a list of (name, torch tensor)."""
    rows = (_tuple(_text(name), _tensor(np.ascontiguousarray(value))) for name, value in tensors)
    return b"\x80\x04](" + b"".join(rows) + b"e."


def _tensor(value: np.ndarray) -> bytes:
    storage = _storage(value)
    size = len(storage).to_bytes(8, "little")
    loaded = b"ctorch.storage\n_load_from_bytes\n\x8e" + size + storage + b"\x85R"
    strides = (step // value.itemsize for step in value.strides)
    shape, strides = (_tuple(*map(_number, numbers)) for numbers in (value.shape, strides))
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n"
        + _tuple(loaded, _number(0), shape, strides, b"\x89", hooks)
        + b"R"
    )


def _storage(value: np.ndarray) -> bytes:
    kind = b"ctorch\n" + _STORAGES[value.dtype.name].encode() + b"\n"
    about = (
        b"\x80\x02" + _tuple(_text("storage"), kind, _text("0"), _text("cpu"), _number(value.size)) + b"Q."
    )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", about)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/data/0", value.tobytes())
        file.writestr("archive/version", "3\n")
    return out.getvalue()


def _text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _number(number: int) -> bytes:
    return b"\x8a\x08" + int(number).to_bytes(8, "little", signed=True)


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"
