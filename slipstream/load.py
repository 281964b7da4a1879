"""Names become weights: a target, its tokenizer and a drafter, on one device and in one dtype.

What was chosen, and why, goes along as notes. Several engines may share what is loaded (`Models`). Knows nothing of
requests or pools; called by `llm` and by whoever runs several engines on the same weights.
"""

import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from slipstream.config import NGRAM
from slipstream.device.memory import in_words, memory_of, must_fit
from slipstream.errors import CheckpointError, ConfigError, SlipstreamError
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter, load_drafter
from slipstream.models.layers import prepack_networks
from slipstream.models.locate import RANDOM, resolve_drafter, resolve_target
from slipstream.models.probe import PROMPT, layout_agreement
from slipstream.models.random_weights import random_decoder, random_drafter
from slipstream.models.shapes import drafter_shape, num_values, shape_name, target_shape
from slipstream.models.spec import DecoderSpec
from slipstream.models.synthetic import synthetic_tokenizer
from slipstream.models.tokenizer import Tokenizer, load_tokenizer
from slipstream.models.weights import load_decoder, read_spec

log = logging.getLogger("slipstream")

Note: TypeAlias = tuple[str, object, str]  # field, value, reason


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Loaded weights and the tokenizer; read-only, so that several engines can share them."""

    target: Decoder
    tokenizer: Tokenizer
    network: BlockDrafter | None
    target_name: str
    drafter_name: str | None
    drafter_path: Path | None
    notes: tuple[Note, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.target.head_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.target.head_weight.device

    @property
    def vocab_size(self) -> int:
        """Ids that mean something; the target's table may be padded beyond them."""
        return min(self.tokenizer.vocab_size, self.target.spec.vocab_size)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids) | frozenset(self.target.spec.eos_token_ids)


def load_models(
    model: str, draft_model: str | None = None, *, dtype: str = "auto", device: str = "auto", layout: str = "auto"
) -> Models:
    """Load a target (folder, .gguf file or built-in name), its tokenizer, and a drafter (folder, built-in name, or ngram).

    `random:SHAPE` is a target, `random` or `random:SHAPE` a drafter whose weights are drawn at random (`models.shapes`).
    `layout` other than auto overrides what the drafter says about its rows (`SpeculativeConfig.draft_layout`).
    """
    notes: list[Note] = []
    on = choose_device(device, notes)
    kind = _dtype(dtype, on, notes)
    target, tokenizer = _target(model, kind, on, notes)
    network, folder = _drafter(draft_model, target, None if layout == "auto" else layout, notes)
    if prepack_networks(target, *([network] if network else [])):
        notes.append(("weights", "prepacked", "in the order in which this CPU multiplies bf16 matrices"))
    both_trained = shape_name(model) is None and folder is not None
    # Our own files say twice how they are read.
    if network is not None and both_trained and network.spec.dialect != "slipstream":
        notes.append(_probe(target, network, tokenizer))
    return Models(target, tokenizer, network, model, draft_model, folder, tuple(notes))


def _target(model: str, dtype: torch.dtype, device: torch.device, notes: list[Note]) -> tuple[Decoder, Tokenizer]:
    shape = shape_name(model)
    if shape is None:
        path = resolve_target(model)
        tokenizer = load_tokenizer(path)  # first: it takes no time, and a fault is told before gigabytes are read
        spec = read_spec(path)
        check_tokenizer(tokenizer, spec, notes)
        needed = num_values(spec) * dtype.itemsize if device.type == "cpu" else 0
        with must_fit(lambda: _too_large("target", model, _files_of(path), device), needed):
            return load_decoder(path, dtype, device), tokenizer
    with must_fit(lambda: _too_large("target", model, "", device)):
        target = random_decoder(target_shape(shape), dtype, device)
    notes.append(_drawn("model", model))
    return target, synthetic_tokenizer(target.spec.vocab_size)


def _drafter(
    draft_model: str | None, target: Decoder, layout: str | None, notes: list[Note]
) -> tuple[BlockDrafter | None, Path | None]:
    """The network and the folder it came from, which one that was drawn at random does not have."""
    if draft_model is None or draft_model == NGRAM:
        return None, None
    shape, folder, device = shape_name(draft_model), None, target.head_weight.device
    if shape is None:
        path = folder = resolve_drafter(draft_model)
        with must_fit(lambda: _too_large("drafter", draft_model, _files_of(path), device)):
            network = load_drafter(folder, target, layout=layout)
    else:
        with must_fit(lambda: _too_large("drafter", draft_model, "", device)):
            network = random_drafter(drafter_shape(shape, target.spec, layout), target)
        notes.append(_drawn("draft_model", draft_model))
    notes.append(("layout", network.spec.layout, network.spec.layout_reason))
    return network, folder


def _too_large(kind: str, name: str, files: str, device: torch.device) -> str:
    return (
        f"the {kind} {name!r} does not fit in memory{files}; {memory_of(device)}: free it of other programs, or take a "
        "smaller model or dtype"
    )


def _files_of(path: Path) -> str:
    """The size of the weights on disk, which is about their size in memory."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return f", its files hold {in_words(sum(file.stat().st_size for file in files))}"


def check_tokenizer(tokenizer: Tokenizer, spec: DecoderSpec, notes: list[Note]) -> None:
    """CheckpointError unless the target has a row for every token that a text can become, and for those that end one."""
    ends = {"eos_token_id": (*tokenizer.eos_token_ids, *spec.eos_token_ids), "bos_token_id": (tokenizer.bos_token_id,)}
    for field, ids in ends.items():
        for token_id in ids:
            if token_id is not None and not 0 <= token_id < spec.vocab_size:
                raise CheckpointError(
                    f"{tokenizer.source}: {field} {token_id} is outside of the model's {spec.vocab_size} tokens; correct it "
                    "in config.json, generation_config.json or the tokenizer's files"
                )
    beyond = tokenizer.tokens_from(spec.vocab_size)
    if not all(map(tokenizer.is_added, beyond)):
        raise CheckpointError(
            f"{tokenizer.source}: the tokenizer has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{spec.vocab_size} rows; they belong to different models: fetch both again"
        )
    if beyond:
        reason = f"added to the tokenizer, but without a row of the model's embedding ({spec.vocab_size}); texts with them are refused"
        log.warning("tokens %s: %s", ", ".join(map(repr, beyond.values())), reason)
        notes.append(("unusable_tokens", tuple(beyond), reason))


def _drawn(field: str, name: str) -> Note:
    """Whoever reads a figure of such a model has to know it, so it is not only a note."""
    reason = "speed and memory are those of real ones, texts and acceptance mean nothing"
    log.warning("%s %s: weights are %s; %s", field, name, RANDOM, reason)
    return (f"{field}_weights", RANDOM, reason)


def _probe(target: Decoder, network: BlockDrafter, tokenizer: Tokenizer) -> Note:
    """Whether the drafter's rows are read rightly; a layout that the target's own tokens contradict is warned of."""
    try:
        prompt = tokenizer.chat([{"role": "user", "content": PROMPT}])
    except SlipstreamError:  # no chat template, or one that wants other messages
        prompt = PROMPT
    found = layout_agreement(target, network, tokenizer.encode(prompt))
    if found is None:
        return ("layout_probe", "not run", "the target is too slow, or a context too short, to compare with its answer")
    if found.verdict == "contradicts":
        log.warning(
            "the drafter's layout is probably wrong: %s; set draft_layout (--draft-layout) to %s",
            found,
            found.other_layout,
        )
    return ("layout_probe", found.verdict, str(found))


def choose_device(asked: str, notes: list[Note]) -> torch.device:
    """The device of that name, one that is there; with `auto`, a note says why it was chosen."""
    if asked == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        notes.append(("device", str(device), "a GPU is there" if device.type == "cuda" else "torch sees no GPU"))
        return device
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ConfigError(f"device is {asked!r}; choose auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {asked!r}; choose auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {asked!r}, but torch sees no GPU; use device auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {asked!r}, torch sees {torch.cuda.device_count()} GPUs; they count from cuda:0")
    if device.index:  # kernels, graphs and threads go by the current GPU, which is the first
        raise ConfigError(
            f"device is {asked!r}; use cuda, and choose the GPU from outside: CUDA_VISIBLE_DEVICES={device.index}"
        )
    return device


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def _dtype(asked: str, device: torch.device, notes: list[Note]) -> torch.dtype:
    if asked != "auto":
        if asked not in _DTYPES:
            raise ConfigError(f"dtype is {asked!r}; choose auto, {', '.join(_DTYPES)}")
        return _DTYPES[asked]
    if device.type == "cuda" or _cpu_has_bf16():
        notes.append(("dtype", "bfloat16", f"the {device.type} computes it natively"))
        return torch.bfloat16
    notes.append(("dtype", "float32", "this CPU has no bf16 instructions"))
    return torch.float32


def _cpu_has_bf16() -> bool:
    """Whether matrix products in bf16 are native: emulated, they are many times slower than fp32."""
    if platform.system() != "Linux":
        return platform.machine() == "arm64"
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
