"""A tokenizer built from the metadata of a GGUF file, whose pre-tokenizer is looked up by name in a table.

One that is not there is refused by name; so is metadata that does not fit together. No torch. Called by `tokenizer`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import CheckpointError
from slipstream.models.gguf import GGUFFile

_PREFIX = "tokenizer.ggml."
_MERGES_PER_TOKEN = 16  # at most: several pairs may merge into one token, in published files 2.2 of them
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

# The splits of Llama 3 and Qwen2, as their published tokenizer.json files have them; they differ in how digits group.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pre:
    """What `tokenizer.ggml.pre` stands for."""

    digits_alone: bool = False  # each digit is a piece of its own, cut before all else
    split: str | None = None  # None: the split of GPT-2, built into the byte-level step
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is taken whole
    add_bos: bool = False  # where the file does not say


_PRE_TOKENIZERS: Mapping[str, _Pre] = {
    "smollm": _Pre(digits_alone=True),
    "llama-bpe": _Pre(split=_SPLIT % "{1,3}", ignore_merges=True, add_bos=True),
    "qwen2": _Pre(split=_SPLIT % "", nfc=True),
}


def read_gguf(path: Path) -> dict[str, Any]:
    """The fields of a `Tokenizer`, but for those that its backend tells."""
    with GGUFFile(path) as file:
        kind, pre_name = file.text("tokenizer.ggml.model"), str(file.text("tokenizer.ggml.pre"))
        if kind != "gpt2":
            raise CheckpointError(
                f"{path}: tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' (byte-level BPE)"
            )
        if pre_name not in _PRE_TOKENIZERS:
            known = ", ".join(_PRE_TOKENIZERS)
            raise CheckpointError(f"{path}: tokenizer.ggml.pre {pre_name!r} is not supported (known: {known})")
        pre, tokens = _PRE_TOKENIZERS[pre_name], _texts(file, "tokens", file.num_rows)
        if not tokens:
            raise CheckpointError(f"{path}: tokenizer.ggml.tokens is missing; fetch the file again")
        kinds = file.array(f"{_PREFIX}token_type", len(tokens))
        keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {name: file.token_id(key) for name, key in keys.items()}
        return {
            "backend": _byte_level(path, tokens, _texts(file, "merges", _MERGES_PER_TOKEN * len(tokens)), kinds, pre),
            "bos_token_id": ids["bos_token"],
            "eos_token_ids": file.eos_token_ids,
            "add_bos": file.flag(f"{_PREFIX}add_bos_token", pre.add_bos),
            "special_tokens": {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
            "chat_template": file.text("tokenizer.chat_template"),
        }


def _texts(file: GGUFFile, key: str, most: int | None) -> list[str]:
    found = file.array(_PREFIX + key, most)
    if not all(isinstance(one, str) for one in found):
        raise CheckpointError(f"{file.path}: {_PREFIX}{key} must be a list of texts; fetch the file again")
    return found


def _byte_level(path: Path, tokens: list[str], merged: list[str], kinds: list[Any], pre: _Pre) -> tokenizers.Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in merged)]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises plain Exception, for example for a merge without its token
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens and merges do not fit together: {error}") from error
    backend = tokenizers.Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.digits_alone else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    typed = list(zip(tokens, kinds, strict=False))
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])
    return backend
