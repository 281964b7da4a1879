"""A drafter folder rewritten for other engines: z-lab's DFlash, DeepSpec's DSpark, speculators.

The weights are copied bit by bit; only names, the config and what the dialect keeps beside the network differ. Tables
that a dialect wants and the file does not hold are copied from the target, whose other weights are not read. What
cannot be said in a dialect, or would draft otherwise there, is refused by name. Called by the command `export`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import CALIBRATION_FILE
from slipstream.decide.calibration import Calibration
from slipstream.errors import ConfigError
from slipstream.models.checkpoint import DrafterSpec, check_fit, read_checkpoint
from slipstream.models.dialect_configs import deepspec_config, speculators_config, z_lab_config
from slipstream.models.dialects import architecture, need
from slipstream.models.drafters import draft_token_ids, same_table, tensor_reader
from slipstream.models.folder import member, read_json
from slipstream.models.gguf import GGUFFile, hf_name
from slipstream.models.headers import read_headers, weights_digest
from slipstream.models.spec import DecoderSpec
from slipstream.models.tensors import bare_name
from slipstream.models.weights import read_spec
from slipstream.models.write import write_folder

EMBEDDING, HEAD, BIAS = "embed_tokens.weight", "lm_head.weight", "confidence_head.proj.bias"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The target that a drafter belongs to: where it lies, how others are to name it, and its shape."""

    path: Path
    name: str
    spec: DecoderSpec

    @classmethod
    def at(cls, path: Path, name: str | None = None) -> "ExportTarget":
        return cls(path, name or str(path), read_spec(path))

    @property
    def class_name(self) -> str:
        named = architecture(read_json(member(self.path, "config.json"))) if self.path.is_dir() else None
        return named or _CLASSES[self.spec.family]

    def tables(self) -> tuple[Tensor, Tensor]:
        """Embedding and output head, each [V, H], as stored; the same table twice where they are tied."""
        found = self._from_gguf() if self.path.is_file() else self._from_folder()
        need(EMBEDDING in found, f"{self.path} holds no {EMBEDDING}")
        need(
            self.spec.tie_word_embeddings or HEAD in found, f"{self.path} holds no {HEAD}, and its tables are not tied"
        )
        return found[EMBEDDING], found[EMBEDDING if self.spec.tie_word_embeddings else HEAD]

    def _from_gguf(self) -> dict[str, Tensor]:
        with GGUFFile(self.path) as file:
            named = {hf_name(name): entry for name, entry in file.entries.items()}
            return {name: torch.from_numpy(file.read(named[name])) for name in (EMBEDDING, HEAD) if name in named}

    def _from_folder(self) -> dict[str, Tensor]:
        headers = {bare_name(name): header for name, header in read_headers(self.path).items()}
        wanted = {name: headers[name] for name in (EMBEDDING, HEAD) if name in headers}
        with ExitStack() as stack:
            read = tensor_reader(stack, wanted)
            return {name: read(name) for name in wanted}


def export_drafter(
    source: Path, out: Path, dialect: str, target: ExportTarget | None = None, layout: str | None = None
) -> DrafterSpec:
    """Write the drafter in `source` to the new folder `out` in another dialect; returns what was written, read back.

    `layout` overrides what the source says. Raises CheckpointError naming what the dialect cannot say.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"dialect is {dialect!r}; choose one of {', '.join(DIALECTS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already and is not empty; name a new folder")
    spec, headers = read_checkpoint(source, layout)
    if target is not None:
        check_fit(spec, target.spec)
        spec = dataclasses.replace(spec, num_target_layers=target.spec.num_layers)
    config = DIALECTS[dialect].config(spec, target)  # refuses before a weight is read
    calibration = _calibration(source)
    with ExitStack() as stack:
        read = tensor_reader(stack, headers)
        weights = {name: read(name) for name in headers}
        weights = DIALECTS[dialect].weights(spec, weights, target)
        config["torch_dtype"] = str(weights["fc.weight"].dtype).removeprefix("torch.")
        write_folder(out, {name: weight.contiguous() for name, weight in weights.items()}, config)
    if calibration is not None:
        _for_weights(calibration, weights_digest(source), weights_digest(out)).save(out / CALIBRATION_FILE)
    return _read_back(out, spec)


def _calibration(source: Path) -> Calibration | None:
    """It is of the confidences, which stay the same. Only Slipstream reads it."""
    path = member(source, CALIBRATION_FILE)
    return Calibration.load(path) if path.is_file() else None


def _for_weights(calibration: Calibration, before: str, after: str) -> Calibration:
    """The same weights have another digest in another form; what was measured on yet others stays as it is."""
    moved = {key: after if measured == before else measured for key, measured in calibration.weights.items()}
    return dataclasses.replace(calibration, weights=moved)


# --- dialects ---------------------------------------------------------------------------------------------------------


def _z_lab_config(spec: DrafterSpec, target: ExportTarget | None) -> dict[str, Any]:
    return z_lab_config(spec)


def _deepspec_config(spec: DrafterSpec, target: ExportTarget | None) -> dict[str, Any]:
    config = deepspec_config(spec)  # what cannot be said comes before what is missing
    _needed(target, "deepspec")
    return config


def _speculators_config(spec: DrafterSpec, target: ExportTarget | None) -> dict[str, Any]:
    target = _needed(target, "speculators")
    return speculators_config(spec, target.name, target.class_name)


def _needed(target: ExportTarget | None, dialect: str) -> ExportTarget:
    if target is None:
        raise ConfigError(f"the dialect {dialect} holds tables or the name of the target; name it with --model")
    return target


def _z_lab_weights(spec: DrafterSpec, weights: dict[str, Tensor], target: ExportTarget | None) -> dict[str, Tensor]:
    """No tables: those in the file must be copies of the target's."""
    own = [name for name in (EMBEDDING, HEAD) if name in weights]
    if own and target is None:
        raise ConfigError(
            f"the drafter holds {' and '.join(own)}, and z-lab files do not: name the target with --model"
        )
    tables = dict(zip((EMBEDDING, HEAD), target.tables(), strict=True)) if target and own else {}
    for name in own:
        need(
            same_table(weights[name], tables[name]),
            f"{name} differs from the target's: a table of its own cannot be said in the dialect z-lab; "
            "export to deepspec or speculators",
        )
    return {name: weight for name, weight in weights.items() if name not in own}


def _deepspec_weights(spec: DrafterSpec, weights: dict[str, Tensor], target: ExportTarget | None) -> dict[str, Tensor]:
    """Both tables, the target's where the file has none; a confidence head always with a bias."""
    dtype = weights["fc.weight"].dtype
    if not (EMBEDDING in weights and HEAD in weights):
        embedding, head = (table.to(dtype) for table in _needed(target, "deepspec").tables())
        weights = {EMBEDDING: embedding, HEAD: head.clone()} | weights  # two tensors of one file share no memory
    return weights | _zero_bias(spec, dtype)


def _speculators_weights(
    spec: DrafterSpec, weights: dict[str, Tensor], target: ExportTarget | None
) -> dict[str, Tensor]:
    """With a reduced vocabulary the kept rows of the head and both maps; else tables are the target's where absent."""
    dtype = weights["fc.weight"].dtype
    weights = weights | _zero_bias(spec, dtype)
    if spec.draft_vocab_size is None:
        return weights
    ids = draft_token_ids(weights["d2t"], spec.vocab_size)
    kept = torch.zeros(spec.vocab_size, dtype=torch.bool)
    kept[ids] = True
    if HEAD not in weights:
        weights = weights | {HEAD: _needed(target, "speculators").tables()[1][ids].to(dtype)}
    return weights | {"d2t": weights["d2t"].to(torch.int64), "t2d": kept}


def _zero_bias(spec: DrafterSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Other engines build the confidence head with a bias; zero is the same as none."""
    return {BIAS: torch.zeros(1, dtype=dtype)} if spec.confidence_head and not spec.confidence_bias else {}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a drafter is said in a dialect, its target at hand or not; the config is made first and refuses first."""

    config: Callable[[DrafterSpec, ExportTarget | None], dict[str, Any]]
    weights: Callable[[DrafterSpec, dict[str, Tensor], ExportTarget | None], dict[str, Tensor]]


DIALECTS: Mapping[str, Dialect] = {
    "z-lab": Dialect(_z_lab_config, _z_lab_weights),
    "deepspec": Dialect(_deepspec_config, _deepspec_weights),
    "speculators": Dialect(_speculators_config, _speculators_weights),
}


def _read_back(out: Path, spec: DrafterSpec) -> DrafterSpec:
    """The written folder's spec, which must be the source's but for what the dialect keeps differently."""
    written, _ = read_checkpoint(out)
    same = dataclasses.replace(
        written, layout_reason=spec.layout_reason, own_embedding=spec.own_embedding, own_head=spec.own_head,
        confidence_bias=spec.confidence_bias, num_target_layers=spec.num_target_layers,
    )  # fmt: skip
    assert same == spec, f"{out} was written as {same}, the source is {spec}"
    return written
