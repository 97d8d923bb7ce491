"""Reading a Hugging Face `config.json` without trusting it: typed values, and refusals by name.

`config.json` is third-party data. Every value a DecoderSpec is made of goes through here, so that a wrong type, an
absurd size or a feature this toolkit would compute wrongly is one clear line instead of wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from quantkit.errors import CheckpointError, RecipeError
from quantkit.models.spec import RopeKind, RopeSpec
from quantkit.numeric import is_number

T = TypeVar("T")

_LARGEST = 1 << 31
_REQUIRED = object()
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class Config:
    """A `config.json` (or one of its sub-dictionaries) whose values are checked as they are read."""

    def __init__(self, data: Any, where: str = "config.json") -> None:
        if not isinstance(data, Mapping):
            raise CheckpointError(f"expected an object, found {type(data).__name__}", where=where)
        self.data: Mapping[str, Any] = data
        self.where = where

    def _get(self, key: str, default: Any) -> Any:
        value = self.data.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointError(f"{key} is missing", where=self.where, next="Give the model's complete config.json")
        return default

    def _wrong(self, key: str, wanted: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{key} must be {wanted}, found {str(value)[:60]!r}", where=self.where)

    def integer(self, key: str, default: Any = _REQUIRED, *, most: int = _LARGEST) -> int:
        """A whole number from 1 to `most`; CheckpointError otherwise."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self._wrong(key, f"a whole number from 1 to {most}", value)
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """Like `integer`; an explicit null stays None, a missing key takes the default."""
        if self.data.get(key, default) is None:
            return None
        return self.integer(key, default)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A positive finite number; CheckpointError otherwise."""
        value = self._get(key, default)
        if not is_number(value) or value <= 0:
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Like `number`; None when missing or null."""
        return None if self.data.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; CheckpointError otherwise."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """A string; CheckpointError otherwise."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive finite numbers; CheckpointError otherwise."""
        value = self._get(key, _REQUIRED)
        good = isinstance(value, list) and all(is_number(v) and v > 0 for v in value)
        if not good or len(value) != length:
            raise self._wrong(key, f"a list of {length} positive numbers", value)
        return tuple(float(v) for v in value)

    def unsupported(self, what: str, next: str = "") -> RecipeError:
        """The error for something valid that this toolkit would get wrong."""
        return RecipeError(what, where=self.where, next=next)


def refuse_unsupported(config: Config) -> None:
    """RecipeError naming the first thing in `config` that no adapter computes: MoE, stored quantization, masks."""
    quantization = config.data.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
        raise config.unsupported(
            f"quantization_config is present ({method}): the checkpoint is already quantized",
            next="Give the unquantized checkpoint; quantizing twice adds both errors",
        )
    for key in _MOE_KEYS:
        count = config.data.get(key)
        if isinstance(count, int) and count > 1:
            raise config.unsupported(f"{key} = {count}: mixture-of-experts models are not supported yet")
    if config.data.get("use_bidirectional_attention"):
        raise config.unsupported("use_bidirectional_attention is true: only causal decoders are supported")


def layer_types(config: Config, num_layers: int) -> tuple[str, ...] | None:
    """`layer_types` when the config lists them: one of full_attention, sliding_attention a layer."""
    value = config.data.get("layer_types")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != num_layers:
        raise CheckpointError(f"layer_types must list {num_layers} layers", where=config.where)
    for kind in value:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.unsupported(
                f"layer_types holds {str(kind)[:60]!r}: only full_attention and sliding_attention are supported"
            )
    return tuple(value)


def rope_entry(config: Config, nested: str | None = None) -> dict[str, Any]:
    """The rope parameters as one flat dict, from `rope_parameters` (Transformers 5) or `rope_scaling` (older).

    `nested` picks one layer type's entry where the config keeps one each (Gemma 3). The older form wins where both
    are present, as in Transformers' `convert_rope_params_to_dict`.
    """
    value = config.data.get("rope_scaling") or config.data.get("rope_parameters") or {}
    if not isinstance(value, Mapping):
        raise CheckpointError("rope_parameters must be an object", where=config.where)
    if nested is not None:
        value = value.get(nested) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"rope_parameters.{nested} must be an object", where=config.where)
    return dict(value)


def rope_spec(
    config: Config,
    entry: Mapping[str, Any],
    *,
    head_dim: int,
    theta: float,
    partial: float = 1.0,
    su_is_longrope: bool = False,
) -> RopeSpec:
    """RopeSpec of one rope entry; unknown kinds are refused by name.

    Args:
        config: the model's config, for `max_position_embeddings` and the older top-level keys.
        entry: what `rope_entry` gave.
        head_dim: channels a head.
        theta: base where neither the entry nor the config names one.
        partial: share of the channels that rotate where the entry names none.
        su_is_longrope: Phi-3's first configs call longrope "su" or "yarn".
    """
    rope = Config(entry, f"{config.where}: rope_parameters")
    kind = rope.text("rope_type", entry.get("type") or "default")
    if su_is_longrope and kind in ("su", "yarn"):
        kind = "longrope"
    share = rope.number("partial_rotary_factor", partial)
    rotary_dim = int(head_dim * share)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise config.unsupported(f"rope turns {rotary_dim} of {head_dim} channels: an even number from 2 is needed")
    base = rope.number("rope_theta", theta)
    if base <= 1:
        raise CheckpointError(f"rope_theta must exceed 1, found {base}", where=rope.where)
    name, params = one_of(rope, "rope_type", kind, _KINDS)
    return RopeSpec(name, base, rotary_dim, params(config, rope, rotary_dim))


def _original(config: Config, rope: Config) -> int:
    """Positions the model was first trained on: a top-level key wins, as in `standardize_rope_params`."""
    key = "original_max_position_embeddings"
    source = config if config.data.get(key) is not None else rope
    positions = source.integer(key, config.integer("max_position_embeddings"))
    if positions < 2:
        raise CheckpointError(f"{key} must be at least 2, found {positions}", where=source.where)
    return positions


def _default(config: Config, rope: Config, rotary_dim: int) -> dict[str, Any]:
    return {}


def _linear(config: Config, rope: Config, rotary_dim: int) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _llama3(config: Config, rope: Config, rotary_dim: int) -> dict[str, Any]:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"high_freq_factor {high} must exceed low_freq_factor {low}", where=rope.where)
    return {
        "factor": rope.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": _original(config, rope),
    }


def _yarn(config: Config, rope: Config, rotary_dim: int) -> dict[str, Any]:
    original = _original(config, rope)
    factor = rope.optional_number("factor") or config.integer("max_position_embeddings") / original
    params: dict[str, Any] = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": rope.number("beta_fast", 32),
        "beta_slow": rope.number("beta_slow", 1),
        "truncate": rope.flag("truncate", True),
    }
    for key in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.data.get(key):
            params[key] = rope.number(key)
    return params


def _longrope(config: Config, rope: Config, rotary_dim: int) -> dict[str, Any]:
    original = _original(config, rope)
    factor = rope.optional_number("factor") or config.integer("max_position_embeddings") / original
    params: dict[str, Any] = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "short_factor": rope.numbers("short_factor", rotary_dim // 2),
        "long_factor": rope.numbers("long_factor", rotary_dim // 2),
    }
    if rope.data.get("attention_factor") is not None:
        params["attention_factor"] = rope.number("attention_factor")
    return params


_KINDS: dict[str, tuple[RopeKind, Callable[[Config, Config, int], dict[str, Any]]]] = {
    "default": ("default", _default),
    "linear": ("linear", _linear),
    "llama3": ("llama3", _llama3),
    "yarn": ("yarn", _yarn),
    "longrope": ("longrope", _longrope),
}


def one_of(config: Config, key: str, value: str, known: Mapping[str, T]) -> T:
    """`known[value]`, or RecipeError naming key, value and the known ones."""
    if value not in known:
        raise config.unsupported(f"{key} {value!r} is not supported", next=f"Supported: {', '.join(known)}")
    return known[value]
