"""The shape of a model, and what a family of models is: config.json in and out."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from metagym.models.errors import ModelError


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's stretching of the low rotary frequencies (`rope_type` "llama3" in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): low frequencies are interpolated, high ones stay, and cos
    and sin are scaled by `attention_factor` (none: 0.1 ln(factor) + 1)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


ROPES = {"llama3": Llama3Rope, "yarn": YarnRope}


TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """Low-rank additions to the matrices of a frozen model, with PEFT's names; see `lora.py`."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder, with the names of Hugging Face's config.json. `model_type` is its family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # hidden units of a dense MLP
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | YarnRope | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    model_type: str = "llama"
    qkv_bias: bool = False  # a bias on queries, keys and values
    qk_norm: bool = False  # RMS norm of every query and key head, before the rotation
    num_experts: int = 0  # 0: a dense MLP
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # hidden units of an expert
    norm_topk_prob: bool = True  # the gates of a token's experts sum to 1
    lora: Lora | None = None  # no part of config.json: only these additions are trained

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def context(self) -> int:
        """Most positions that the model computes as it was made for, a scaling included."""
        s = self.rope_scaling
        scaled = int(s.factor * s.original_max_position_embeddings) if isinstance(s, YarnRope) else 0
        return max(self.max_position_embeddings, scaled)

    @property
    def routing_width(self) -> int:
        """R: experts that one token is sent to, all layers together; 0 for a dense model."""
        return self.num_hidden_layers * self.num_experts_per_tok

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelConfig":
        """Reads a config.json. Raises ModelError if it is no model that this package computes."""
        path = Path(path)
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelError(f"{path} does not exist") from None
        except ValueError as e:
            raise ModelError(f"{path} is not JSON: {e}") from None
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config") -> "ModelConfig":
        """Takes the content of a config.json. Raises ModelError, naming `where` and the field."""
        from metagym.models.families import family

        own = family(raw.get("model_type"), where)
        for key, wanted in own.fixed.items():
            if raw.get(key, wanted) != wanted:
                raise ModelError(
                    f"{where}: {key} is {raw[key]!r}, not {wanted!r}; of the family {own.model_type!r} "
                    "nothing else is supported"
                )
        try:
            heads = raw["num_attention_heads"]
            rope = raw.get("rope_parameters") or {}  # transformers 5 keeps theta and scaling together
            common: dict[str, Any] = {
                "vocab_size": raw["vocab_size"],
                "hidden_size": raw["hidden_size"],
                "intermediate_size": raw["intermediate_size"],
                "num_hidden_layers": raw["num_hidden_layers"],
                "num_attention_heads": heads,
                "num_key_value_heads": raw.get("num_key_value_heads") or heads,
                "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
                "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
                "rope_theta": raw.get("rope_theta") or rope.get("rope_theta", 10000.0),
                "rope_scaling": _rope_scaling(raw.get("rope_scaling") or rope, raw, where),
                "tie_word_embeddings": raw.get("tie_word_embeddings", False),
                "max_position_embeddings": raw.get("max_position_embeddings", 2048),
                "model_type": own.model_type,
            }
            config = cls(**{**common, **own.read(raw)})
        except KeyError as e:
            raise ModelError(f"{where}: the field {e} is missing") from None
        if heads % config.num_key_value_heads:
            raise ModelError(
                f"{where}: num_attention_heads {heads} is no multiple of "
                f"num_key_value_heads {config.num_key_value_heads}"
            )
        return config

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json that transformers and SGLang read."""
        from metagym.models.families import family

        own, scaling = family(self.model_type, "config"), None
        if self.rope_scaling is not None:
            kind = next(k for k, v in ROPES.items() if isinstance(self.rope_scaling, v))
            scaling = {k: v for k, v in asdict(self.rope_scaling).items() if v is not None}
            scaling["rope_type"] = kind
        names = (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
            *("max_position_embeddings", "model_type", *own.fields),
        )
        return {
            "architectures": [own.architecture],
            **{name: getattr(self, name) for name in names},
            "rope_scaling": scaling,
            **own.fixed,
            "attention_dropout": 0.0,
            "torch_dtype": "float32",
        }


def stretched(config: ModelConfig, factor: float) -> ModelConfig:
    """The model with its positions stretched by `factor` with YaRN; 0: as it is."""
    if not factor:
        return config
    return replace(config, rope_scaling=YarnRope(float(factor), config.max_position_embeddings))


def _rope_scaling(raw: Mapping[str, Any], model: Mapping[str, Any], where: str) -> Any:
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ROPES:
        raise ModelError(
            f"{where}: rope_type is {kind!r}; supported: 'default', {', '.join(map(repr, ROPES))}"
        )
    given = {"original_max_position_embeddings": model.get("max_position_embeddings"), **raw}
    fields = ROPES[kind].__dataclass_fields__
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *fields}
    odd = {k: v for k, v in raw.items() if k not in known and v is not None}
    if odd or raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{where}: rope scaling {kind!r} with {odd or 'partial_rotary_factor'} is not supported"
        )
    own = {k: given[k] for k, f in fields.items() if given.get(k) is not None}
    try:
        return ROPES[kind](**own)
    except TypeError:
        missing = [k for k, f in fields.items() if k not in own]
        raise KeyError(missing[0]) from None


@dataclass(frozen=True)
class Family:
    """What tells one family of models from another; a file of its own for each."""

    model_type: str  # in config.json
    architecture: str  # its class in transformers
    fixed: Mapping[str, Any]  # fields of config.json that must have this value, if they are there
    read: Callable[
        [Mapping[str, Any]], dict[str, Any]
    ]  # config.json -> fields of ModelConfig beyond the common
    recipes: Callable[[ModelConfig], dict[str, Any]]  # a parameter's path -> the tensors it is made of
    fields: tuple[str, ...] = field(
        default=()
    )  # fields of ModelConfig that config.json has besides the common
