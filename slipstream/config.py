"""Options as values: what a request may ask for, how speculation is done, how the engine is sized.

Frozen and keyword-only. Each class checks itself when it is made and says which field is wrong and what to do. The
engine never looks at a mode's name: `SpeculativeConfig.mode` is turned into one Policy object at the edge (`build.py`).
"""

import dataclasses
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from slipstream.errors import ConfigError, RequestError
from slipstream.structured import StructuredOutput

Mode = Literal["off", "static", "adaptive", "lag", "lag-budget"]
MODES: tuple[Mode, ...] = get_args(Mode)
Signal = Literal["head", "peak", "drawn"]  # what a drafter says of its drafts
SIGNALS: tuple[Signal, ...] = get_args(Signal)
Acceptance = Literal["coupled", "rejection"]
NGRAM = "ngram"  # the drafter that needs no files; a folder of that name is ./ngram
CALIBRATION_FILE = "calibration.json"  # its name beside the weights of a drafter
DEFAULT_MAX_DRAFTS = 7  # S when the user names none and the drafter could do more
MAX_STOPS = 16  # stop strings of one request
MAX_STOP_CHARS = 1 << 12  # of all of them: every answer prepares its own search, character by character
MAX_STOP_IDS = 1 << 12  # counted one by one when an answer gets its slot
MAX_SIBLINGS = 128  # answers to one prompt
# Why only the triton backend has `deterministic`, and what there is without it.
NOT_DETERMINISTIC = (
    "torch sums in another order for another number of rows, so nothing can be promised; use a GPU with backend triton, or "
    "dtype float32 without deterministic, where texts of all modes are equal but for ties below 2e-4"
)
_LARGEST_FP32 = 3.4e38  # the device keeps temperatures in fp32
MAX_LOGPROBS = 20  # top tokens that one entry may name
MAX_BIASES = 300  # entries of one request's logit_bias: every slot has room for so many
MAX_BANS = 128  # ids that min_tokens keeps from ending an answer: the same


def _choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{field} is {value!r}; choose one of {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """What one request asks of the sampler. Temperature 0 is greedy, and then top_k, top_p, min_p and seed have no effect.

    Applied in this order, to every token's own logits: repetition_penalty, frequency_penalty, presence_penalty,
    logit_bias, the bans of min_tokens; then temperature; then top_k, top_p, min_p. The first five change greedy
    answers too. What each does exactly stands in `slipstream.ops.shape_logits` and `slipstream.ops.sample`.
    """

    temperature: float = 0.0
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # in [0, 1]: least probability of a token, as a share of the most probable one's
    repetition_penalty: float = 1.0  # in [0.001, 1000]: divides positive, multiplies negative logits of known tokens
    frequency_penalty: float = 0.0  # in [-2, 2]: subtracted for each time that the output holds the token
    presence_penalty: float = 0.0  # in [-2, 2]: subtracted once, if the output holds the token
    # Token id -> what is added to its logit, in [-100, 100].
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    # Before so many tokens no EOS (unless it is ignored) and no stop id is chosen, and no stop string ends the answer.
    min_tokens: int = 0
    seed: int | None = None  # None: a random one is drawn for the request
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: str | tuple[str, ...] = ()  # texts that end the answer, which is cut before them; kept as a tuple
    include_stop_str_in_output: bool = False  # the text ends with the stop string, if one ends it, not before it
    n: int = 1  # answers to the prompt, each with a seed of its own
    # Log-probabilities of the output's, or the prompt's, tokens: None = none, 0 = of those tokens alone, k = of the k most
    # probable ones besides, at most 20. Always log-softmax of the target's own logits, before all that is named above.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None  # the form that the answer must have

    def __getstate__(self) -> tuple[Any, ...]:  # dataclass has its own, which takes some times as long
        values: tuple[Any, ...] = _VALUES(self)
        return values

    def __setstate__(self, values: tuple[Any, ...]) -> None:
        for name, value in zip(_FIELDS, values, strict=True):
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= _LARGEST_FP32:
            raise RequestError(f"temperature is {self.temperature!r}; it must be a finite number, 0 (greedy) or above")
        object.__setattr__(self, "temperature", float(self.temperature))
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p!r}; it must lie in (0, 1], 1 switches it off")
        if not _is_int(self.top_k) or not 0 <= self.top_k < 2**63:
            raise RequestError(f"top_k is {self.top_k!r}; it must be a whole number, 0 switches it off")
        self._check_shaping()
        if not _is_int(self.max_tokens) or not 1 <= self.max_tokens < 2**63:  # min_tokens, below it, goes to the device
            raise RequestError(f"max_tokens is {self.max_tokens!r}; ask for at least 1 token, in 63 bits")
        if not _is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens!r}; it must be a whole number from 0 (off) to max_tokens "
                f"({self.max_tokens})"
            )
        if self.seed is not None and (not _is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise RequestError(f"seed is {self.seed!r}; it must be a whole number of at most 64 bits, or None")
        if not isinstance(self.stop_token_ids, list | tuple):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}; give a list of token ids")
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise RequestError(f"stop_token_ids holds {token!r}; token ids are whole numbers from 0")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"stop_token_ids holds {len(self.stop_token_ids)} ids; give at most {MAX_STOP_IDS}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; it must be true or false")
        object.__setattr__(self, "stop", _stops(self.stop))
        if not isinstance(self.include_stop_str_in_output, bool):
            raise RequestError(
                f"include_stop_str_in_output is {self.include_stop_str_in_output!r}; it must be true or false"
            )
        if not _is_int(self.n) or not 1 <= self.n <= MAX_SIBLINGS:
            raise RequestError(f"n is {self.n!r}; ask for 1 to {MAX_SIBLINGS} answers")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and (not _is_int(value) or not 0 <= value <= MAX_LOGPROBS):
                raise RequestError(
                    f"{name} is {value!r}; it must be a whole number from 0 (the token's own) to {MAX_LOGPROBS}, or None"
                )
        if self.structured is not None:
            self._check_structured(StructuredOutput.of(self.structured))

    def _check_structured(self, structured: StructuredOutput) -> None:
        object.__setattr__(self, "structured", structured)
        if self.min_tokens:
            raise RequestError(
                "min_tokens bans the only tokens that a structured answer may have once it is complete: set it to 0"
            )
        if self.ignore_eos and not self.stop_token_ids:
            raise RequestError(
                "ignore_eos leaves no token to a structured answer once it is complete: switch it off, or give "
                "stop_token_ids that end it"
            )

    def _check_shaping(self) -> None:
        for name, low, high, off in (
            ("min_p", 0, 1, 0), ("repetition_penalty", 1e-3, 1e3, 1), ("frequency_penalty", -2, 2, 0),
            ("presence_penalty", -2, 2, 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise RequestError(f"{name} is {value!r}; it must lie in [{low:g}, {high:g}], {off} switches it off")
            object.__setattr__(self, name, float(value))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.prompt_logprobs is not None

    def ends(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end an answer; eos_token_ids: the model's."""
        return (frozenset() if self.ignore_eos else eos_token_ids).union(self.stop_token_ids)

    def check_token_ids(self, vocab_size: int) -> None:
        """RequestError where it names a token that a vocabulary of this size does not have."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if token >= vocab_size:
                    raise RequestError(f"{name} names token {token}; token ids are whole numbers below {vocab_size}")


_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_VALUES = attrgetter(*_FIELDS)


def _checked_bias(bias: object) -> dict[int, float]:
    """A copy, with keys that JSON made texts as numbers again."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {bias!r}; give a mapping of token ids to what is added to their logits")
    if len(bias) > MAX_BIASES:
        raise RequestError(f"logit_bias has {len(bias)} entries; give at most {MAX_BIASES}")
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12 else key
        if not _is_int(token) or not 0 <= token < 2**31:
            raise RequestError(f"logit_bias names token {key!r}; token ids are whole numbers from 0")
        if token in checked:
            raise RequestError(f"logit_bias names token {token} twice, as a number and as a text; keep one of them")
        if not _is_number(value) or not -100 <= value <= 100:
            raise RequestError(f"logit_bias gives token {token} {value!r}; biases lie in [-100, 100]")
        checked[token] = float(value)
    return checked


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How drafts are made and how many of them the target verifies. The defaults verify every draft (mode static)."""

    draft_model: str | None = None  # folder, built-in name, or ngram: look-up in the request's own tokens
    speculative_algorithm: str = "auto"  # auto, dflash, dspark, ngram; anything but auto must agree with the drafter
    num_speculative_tokens: int | None = None  # S; None: what the file drafts, at most 7
    enable_adaptive_speculative_decode: bool = False  # prune widths by confidence
    enable_lag_confidence: bool = False  # decide from the previous step's confidence
    confidence_allocation: Literal["lagged", "fresh"] = "lagged"  # fresh: the device hands out a lagged total
    confidence_signal: Signal | Literal["auto"] = "auto"
    adaptive_speculative_min_gain: float = 0.0  # relative gain that one more draft must promise
    acceptance: Acceptance = "coupled"
    draft_sampling: Literal["auto", "greedy", "sample"] = "auto"  # auto: sample, which accepts more (docs/LOG.md)
    cost_model: str = "auto"  # auto, none, or a file
    calibration: str | None = None  # file; None: calibration.json in the drafter's folder, if there
    # Which row of a block predicts which token: auto (what the drafter's folder says, see `slipstream inspect`), fill_in
    # (row k the token at anchor + k) or anchor_first (at anchor + k + 1). The wrong one drafts at under 1% acceptance.
    draft_layout: Literal["auto", "fill_in", "anchor_first"] = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "speculative_algorithm", str(self.speculative_algorithm).lower())
        _choice("speculative_algorithm", self.speculative_algorithm, ("auto", "dflash", "dspark", NGRAM))
        _choice("confidence_allocation", self.confidence_allocation, ("lagged", "fresh"))
        _choice("confidence_signal", self.confidence_signal, ("auto", *SIGNALS))
        _choice("acceptance", self.acceptance, get_args(Acceptance))
        _choice("draft_sampling", self.draft_sampling, ("auto", "greedy", "sample"))
        _choice("draft_layout", self.draft_layout, ("auto", "fill_in", "anchor_first"))
        for field in ("enable_adaptive_speculative_decode", "enable_lag_confidence"):
            _check_bool(field, getattr(self, field))
        for field, optional in (("draft_model", True), ("cost_model", False), ("calibration", True)):
            value = getattr(self, field)
            if not (value is None and optional) and (not isinstance(value, str | os.PathLike) or not str(value)):
                raise ConfigError(f"{field} is {value!r}; give a name or a path")
        s = self.num_speculative_tokens
        if s is not None and (not _is_int(s) or s < 1):
            raise ConfigError(f"num_speculative_tokens is {s!r}; it must be a whole number from 1")
        gain = self.adaptive_speculative_min_gain
        if not _is_number(gain) or not 0 <= gain < math.inf:
            raise ConfigError(f"adaptive_speculative_min_gain is {gain!r}; it must be a finite number from 0")
        self._refuse_options_without_effect()

    def _refuse_options_without_effect(self) -> None:
        if self.draft_model == NGRAM:
            if self.draft_layout != "auto":
                raise ConfigError(f"draft_layout {self.draft_layout!r}: ngram has no blocks; use auto")
            if self.confidence_signal in ("peak", "drawn"):
                raise ConfigError(
                    f"confidence_signal {self.confidence_signal!r} is a probability, and ngram drafts without any; use "
                    "auto or head, its running acceptance"
                )
            if self.draft_sampling == "sample":
                raise ConfigError("draft_sampling 'sample': ngram never draws its drafts at random; use auto")
        if self.enable_lag_confidence and not self.enable_adaptive_speculative_decode:
            raise ConfigError(
                "enable_lag_confidence needs enable_adaptive_speculative_decode: lag says from which confidence widths "
                "are decided, and without adaptive nothing is decided. Switch adaptive on as well"
            )
        default = {f.name: f.default for f in dataclasses.fields(self)}
        changed = {name for name, value in default.items() if getattr(self, name) != value}
        if self.draft_model is None and changed:
            names = ", ".join(sorted(changed))
            raise ConfigError(f"{names}: no effect without draft_model; name a drafter or drop the option")
        if not self.enable_adaptive_speculative_decode:
            idle = changed & {"confidence_signal", "adaptive_speculative_min_gain", "cost_model", "calibration"}
            if idle:
                raise ConfigError(f"{', '.join(sorted(idle))}: no effect without enable_adaptive_speculative_decode")
        if self.confidence_allocation == "fresh" and not self.enable_lag_confidence:
            raise ConfigError("confidence_allocation 'fresh' needs enable_lag_confidence; switch lag on")
        if self.adaptive_speculative_min_gain and self.confidence_allocation == "fresh":
            raise ConfigError(
                "adaptive_speculative_min_gain works on one token at a time and has no meaning for a budget "
                "(confidence_allocation 'fresh'); set it to 0"
            )

    @property
    def mode(self) -> Mode:
        if self.draft_model is None:
            return "off"
        if not self.enable_adaptive_speculative_decode:
            return "static"
        if not self.enable_lag_confidence:
            return "adaptive"
        return "lag" if self.confidence_allocation == "lagged" else "lag-budget"

    @classmethod
    def for_mode(cls, mode: str, **fields: Any) -> "SpeculativeConfig":
        """The config of a `--verify` mode with the remaining options; mode off takes none."""
        _choice("verify", mode, MODES)
        if mode == "off":
            return cls()
        flags = {
            "enable_adaptive_speculative_decode": mode in ("adaptive", "lag", "lag-budget"),
            "enable_lag_confidence": mode in ("lag", "lag-budget"),
            "confidence_allocation": "fresh" if mode == "lag-budget" else "lagged",
        }
        return from_mapping(cls, {**fields, **flags})

    @classmethod
    def with_effect(cls, mode: str, **fields: Any) -> "SpeculativeConfig":
        """The same without the options that do nothing in this mode, where several modes are given the same ones."""
        ignored = NO_EFFECT.get(mode, frozenset())
        return cls.for_mode(mode, **{name: value for name, value in fields.items() if name not in ignored})


# Options that do nothing, by mode.
NO_EFFECT: Mapping[str, frozenset[str]] = {
    "off": frozenset(SpeculativeConfig.__dataclass_fields__),
    "static": frozenset({"confidence_signal", "adaptive_speculative_min_gain", "cost_model", "calibration"}),
    "lag-budget": frozenset({"adaptive_speculative_min_gain"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the engine is sized. None means: chosen at start, with a reason in the log."""

    dtype: str = "auto"  # auto, bfloat16, float16, float32
    device: str = "auto"  # auto, cpu, cuda
    max_num_seqs: int | None = None  # slots: 64 on a CPU, 256 on a GPU
    max_num_batched_tokens: int | None = None  # given rows per step: 512 on a CPU, 8192 on a GPU
    max_model_len: int | None = None  # positions per request; None: the target's limit
    page_size: int = 16  # tokens per KV page
    # Bytes for the KV pool, or a text such as "2GiB". None: enough for the slots, within the memory at hand.
    kv_memory: int | str | None = None
    # GPU only: how much of its memory may be taken by all who use it, weights and other programs included; None: 0.9.
    gpu_memory_utilization: float | None = None
    seed: int | None = None  # of the seeds drawn for unseeded requests
    prefix_caching: bool = True  # KV of tokens is kept for requests that begin with the same ones
    overlap: bool | None = None  # the host runs one step ahead of the device; None: on a GPU
    backend: str = "auto"  # auto, torch, triton (fused kernels and CUDA graphs; auto on a GPU)
    # Triton only: a row's logits are the same bits whatever shares its step, so that texts are, in bf16 too (docs/EXACT.md).
    deterministic: bool = False

    def __post_init__(self) -> None:
        _choice("dtype", self.dtype, ("auto", "bfloat16", "float16", "float32"))
        _choice("device", str(self.device).split(":")[0], ("auto", "cpu", "cuda"))
        _choice("backend", self.backend, ("auto", "torch", "triton"))
        object.__setattr__(self, "kv_memory", _num_bytes("kv_memory", self.kv_memory))
        share = self.gpu_memory_utilization
        if share is not None and (not _is_number(share) or not 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization is {share!r}; it must lie in (0, 1]")
        if share is not None and self.kv_memory is not None:
            raise ConfigError(
                "kv_memory and gpu_memory_utilization both say how large the KV pool is; drop one of them"
            )
        for field in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_memory"):
            value = getattr(self, field)
            if value is not None and (not _is_int(value) or value < 1):
                raise ConfigError(f"{field} is {value!r}; it must be a whole number from 1")
        if not _is_int(self.page_size) or self.page_size < 1:
            raise ConfigError(f"page_size is {self.page_size!r}; it must be a whole number from 1")
        if self.seed is not None and not _is_int(self.seed):
            raise ConfigError(f"seed is {self.seed!r}; it must be a whole number, or None")
        _check_bool("prefix_caching", self.prefix_caching)
        if self.overlap is not None:
            _check_bool("overlap", self.overlap)
        _check_bool("deterministic", self.deterministic)
        if self.deterministic and (self.backend == "torch" or (self.backend, self.device) == ("auto", "cpu")):
            raise ConfigError(f"deterministic with device {self.device}, backend {self.backend}: {NOT_DETERMINISTIC}")


Config = TypeVar("Config", SamplingParams, SpeculativeConfig, EngineConfig)


def from_mapping(cls: type[Config], fields: dict[str, Any]) -> Config:
    """`cls(**fields)`, but an unknown key is a ConfigError that names it and the nearest known ones."""
    import difflib

    known = [f.name for f in dataclasses.fields(cls)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r} of {cls.__name__}; {hint}")
    return cls(**fields)


def read_config_file(path: Path) -> dict[str, Any]:
    """The options in a JSON or TOML file, flat; flags given beside it win."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path}: expected a table of options at the top, found {type(data).__name__}")
    return data


def _stops(stop: object) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple):
        raise RequestError(f"stop is {stop!r}; give a text, or a list of texts")
    if len(texts) > MAX_STOPS:
        raise RequestError(f"stop holds {len(texts)} texts; give at most {MAX_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop holds {text!r}; each must be a text that is not empty")
    if (size := sum(map(len, texts))) > MAX_STOP_CHARS:
        raise RequestError(f"stop holds {size} characters; give at most {MAX_STOP_CHARS}")
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise RequestError(f"stop holds {text!r} with a lone surrogate, which is no character; decode it properly")
    return tuple(texts)


def _check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{field} is {value!r}; it must be true or false")


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base ** (power + 1)
    for power, prefix in enumerate("kmgt") for unit, base in (("b", 1000), ("ib", 1024))
}  # fmt: skip


def _num_bytes(field: str, value: object) -> object:
    """A text such as 2GiB as a number of bytes; anything else as it is."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([kmgt]?i?b?)", value.strip().lower(), re.ASCII)
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"{field} is {value!r}; give bytes, as a number or with a unit: 2GiB, 500MB")
    return int(float(found[1]) * _UNITS[found[2]])


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
