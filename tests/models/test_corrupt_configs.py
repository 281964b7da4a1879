"""Damaged files beside the weights: configs, tokenizers, calibrations, profiles. Refused by file and field, never run."""

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from slipstream.decide.calibration import Calibration, find_calibration
from slipstream.decide.cost import CostProfile
from slipstream.errors import CheckpointError, ConfigError, EngineError, RequestError, SlipstreamError
from slipstream.models.inspect import describe
from slipstream.models.layers import inverse_frequencies
from slipstream.models.tokenizer import load_tokenizer
from slipstream.models.weights import read_spec
from tests.models.corrupt import CONFIG, VOCAB, Files, folder_files, load, refusal, tokenizer_json, write
from tests.unit.test_cost import a_profile

DEEP, NAN, INF = "[" * 100_000, float("nan"), float("inf")
ANYTHING: tuple[Any, ...] = (
    None, -1, 0, 1, 3, 2**63, 10**400, 1.5, NAN, INF, True, "", "x", "8", [], [1], [[1]], {}, {"a": 1}, "x" * 9_999,
)  # fmt: skip

Path_ = tuple[str | int, ...]


def paths(value: Any, before: Path_ = ()) -> Iterator[Path_]:
    """To every value within a value; of a long list, to its first three."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from paths(inner, (*before, key))


def with_value(whole: Any, path: Path_, value: Any) -> Any:
    changed = copy.deepcopy(whole)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


def variants(whole: Any, step: int = 1) -> Iterator[Any]:
    """With anything in the place of everything, every `step`-th of these."""
    every = ((path, value) for path in paths(whole) for value in ANYTHING)
    for index, (path, value) in enumerate(every):
        if index % step == 0:
            yield with_value(whole, path, value)


@pytest.fixture
def files() -> Files:
    return folder_files()


# --------------------------------------------------------------------------------------------------------- config.json


def config(**changes: Any) -> str:
    return json.dumps(CONFIG | changes)


def scaled(kind: str, **fields: Any) -> str:
    return config(rope_scaling={"rope_type": kind, **fields})


TEXT = config()
CONFIGS: dict[str, tuple[str, str]] = {
    "no bytes": ("", r"config\.json is not valid JSON"),
    "half": (TEXT[: len(TEXT) // 2], r"config\.json is not valid JSON"),
    "a comma too many": (TEXT[:-1] + ",}", r"config\.json is not valid JSON"),
    "two objects": (TEXT + TEXT, r"config\.json is not valid JSON"),
    "Python": (TEXT.replace("true", "True"), r"config\.json is not valid JSON"),
    "deep nesting": (DEEP, "nested too deeply"),
    "deep nesting in a field": (config(x=0).replace('"x": 0', f'"x": {DEEP}{"]" * 100_000}'), "nested too deeply"),
    "a list": ("[]", "holds a JSON list"),
    "a text": ('"x"', "holds a JSON str"),
    "null": ("null", "holds a JSON NoneType"),
    "5 MB": (" " * 5_000_000 + TEXT, "more than 4000000 bytes"),
    "a million lists": ("[" + "[]," * 999_999 + "[]]", "values, more than such a file can need"),
    "a field twice": (TEXT[:-1] + ', "hidden_size": 9}', "'hidden_size' stands twice"),
    "a number of 5,000 digits": (config(hidden_size=8).replace('"hidden_size": 8', f'"hidden_size": {"8" * 5000}'), "not valid JSON"),
    "nothing in it": ("{}", "model_type None is not supported"),
    "another family": (config(model_type="mamba"), "model_type 'mamba' is not supported"),
    "a family of a MB": (config(model_type="x" * 1_000_000), "model_type"),
    "a family that moves the cursor": (config(model_type="\x1b[2J"), "model_type"),
    "code of its own": (config(model_type="x", auto_map={"AutoModel": "modeling.Evil"}), "model_type 'x'"),
    **{
        f"{field} {value!r}"[:60]: (config(**{field: value}), field)
        for field in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings", "head_dim")
        for value in (-1, 2**63, 8.0, "8", [8])
    },
    "more layers than tensors": (config(num_hidden_layers=4096), "tensors .*layers.1.* missing"),
    "fewer layers than tensors": (config(num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1), "has shape"),
    "another width": (config(hidden_size=16), "has shape"),
    "another vocabulary": (config(vocab_size=32), "has shape"),
    "untied": (config(tie_word_embeddings=False), r"lm_head\.weight is missing"),
    "biases that are not there": (config(attention_bias=True), "bias.* missing"),
    "another family's norms": (config(model_type="qwen3"), "q_norm.* missing"),
    "heads that do not divide": (config(num_key_value_heads=3), "num_attention_heads 2 is not a multiple"),
    "a head of odd size": (config(head_dim=3), "head_dim 3 is odd"),
    "layers of no kind": (config(layer_types=["x"]), "layer_types"),
    "more kinds than layers": (config(layer_types=["full_attention"] * 2), "layer_types names 2"),
    "epsilon of NaN": (config(rms_norm_eps=NAN), "rms_norm_eps"),
    "theta of NaN": (config(rope_theta=NAN), "theta must be a finite number"),
    "theta below 0": (config(rope_theta=-1), "theta must be a finite number"),
    "theta of 10^400": (config(rope_theta=10**400), "malformed"),
    "a scaling that is a text": (config(rope_scaling="yarn"), "rope_scaling must be an object"),
    "a scaling of no kind": (scaled("x"), "rope type 'x' is not supported"),
    "a factor of 0": (scaled("linear", factor=0), "factor"),
    "a factor of NaN": (scaled("linear", factor=NAN), "factor"),
    "yarn without theta": (config(rope_theta=1, rope_scaling={"rope_type": "yarn", "factor": 2}), "theta must be above 1"),
    "yarn with a slope below 0": (scaled("yarn", factor=2, beta_fast=-1), "beta_fast"),
    "yarn from 10^400": (scaled("yarn", factor=2, original_max_position_embeddings=10**400), "original_max_position"),
    "llama3 of one frequency": (scaled("llama3", factor=2, low_freq_factor=2, high_freq_factor=2), "below high_freq_factor"),
    "a quantisation": (config(quantization_config={"bits": 4}), "quantization_config"),
    "experts": (config(num_local_experts=8), "num_local_experts"),
    "an end token beyond": (config(eos_token_id=VOCAB), f"eos_token_id {VOCAB} is outside"),
    "an end token below": (config(eos_token_id=-1), "eos_token_id -1 is outside"),
    "an end token that is a text": (config(eos_token_id="</s>"), "token id must be a whole number"),
    "end tokens in lists of lists": (config(eos_token_id=[[1]]), "token id must be a whole number"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_damaged_config_is_refused(case: str, files: Files, tmp_path: Path) -> None:
    text, says = CONFIGS[case]
    folder = write(tmp_path / "m", files | {"config.json": text.encode()})
    assert str(folder) in refusal(folder, says)


def test_anything_in_any_field_of_a_config(files: Files, tmp_path: Path) -> None:
    """Is refused by an error that names the folder, or gives frequencies that are numbers."""
    folder = write(tmp_path / "m", files)
    scaling = {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32,
        "mscale": 1.0,
    }
    more = {"use_sliding_window": False, "sliding_window": None, "layer_types": None, "attention_bias": False}
    for changed in variants(CONFIG | more | {"rope_scaling": scaling}):
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            spec = read_spec(folder)
        except CheckpointError as error:
            known = str(folder) in str(error)
        else:
            known = bool(inverse_frequencies(spec.rope, spec.head_dim).isfinite().all())
        assert known, changed


# ------------------------------------------------------------------------------------------------ tokenizers, templates


@pytest.fixture(scope="module")
def rich() -> dict[str, Any]:
    """A tokenizer.json with something of everything."""
    tokens = ["<s>", "</s>", *map(chr, range(33, 60)), '!"', "#$"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(BPE(vocab, [("!", '"'), ("#", "$")], byte_fallback=True, unk_token="<s>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "b")])
    split = pre_tokenizers.Split(Regex(r"\d"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.add_special_tokens(["<s>", "</s>"])
    backend.enable_truncation(5)
    found: dict[str, Any] = json.loads(backend.to_str())
    return found


def test_anything_in_any_field_of_a_tokenizer(rich: dict[str, Any], tmp_path: Path) -> None:
    """Is refused, at load or with a text: never an error of the library's, and never its panic."""
    for changed in variants(rich, step=3):
        folder = write(tmp_path / "m", {"tokenizer.json": json.dumps(changed).encode()})
        with contextlib.suppress(SlipstreamError):
            tokenizer = load_tokenizer(folder)
            ids = tokenizer.encode('a!"#$12 <s> aaaaaaaaaaaac', add_special=True)
            tokenizer.answer([*ids, 10**6])


def tokens(**changes: Any) -> bytes:
    return json.dumps(json.loads(tokenizer_json()) | changes).encode()


def vocab(**words: int) -> bytes:
    model = json.loads(tokenizer_json())["model"]
    return tokens(model=model | {"vocab": model["vocab"] | words})


WHOLE = tokenizer_json()
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
FIRST = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}], "pair": []}
TOKENIZERS: dict[str, tuple[bytes, str]] = {
    **{f"cut to {length} bytes": (WHOLE[:length], "cannot be read") for length in range(0, len(WHOLE), len(WHOLE) // 12)},
    "cut by a byte": (WHOLE[:-1], "cannot be read"),
    "no UTF-8": (b"\xff\xfe" + WHOLE, "cannot be read"),
    "UTF-16": (WHOLE.decode().encode("utf-16"), "cannot be read"),
    "NULs": (bytes(200), "cannot be read"),
    "a pickle": (b"cos\nsystem\n(S'true'\ntR.", "cannot be read"),
    "deep nesting": (DEEP.encode(), "cannot be read"),
    **{f"{text}"[:20]: (text.encode(), "cannot be read") for text in ("[]", "{}", "null", '"x"', "nonsense")},
    **{
        f"{field} {value!r}"[:50]: (tokens(**{field: value}), "cannot be read")
        for field in ("model", "pre_tokenizer", "normalizer", "decoder", "post_processor", "added_tokens")
        for value in (1, "x", [1], {"type": "Evil"}, {"type": "__reduce__"})
    },
    "no version": (tokens(version=None), "cannot be read"),
    "an expression that is none": (tokens(pre_tokenizer=SPLIT | {"pattern": {"Regex": "(("}}), "cannot be read"),
    "a token id below 0": (vocab(x=-1), "cannot be read"),
    "a token id of 2^32": (vocab(x=2**32), "cannot be read"),
    "a vocabulary from files": (tokens(model={"type": "WordLevel", "vocab": "/etc/passwd", "unk_token": "x"}), "cannot be read"),
    "a special token that is not there": (
        tokens(post_processor=FIRST | {"special_tokens": {}}), "cannot be read.*key",
    ),
    "more words than rows": (vocab(x=VOCAB), f"has {VOCAB + 1} tokens, the model's embedding {VOCAB} rows"),
    "a word far away": (vocab(x=2**31), "they belong to different models"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_damaged_tokenizer_is_refused(case: str, files: Files, tmp_path: Path) -> None:
    content, says = TOKENIZERS[case]
    folder = write(tmp_path / "m", files | {"tokenizer.json": content})
    assert str(folder) in refusal(folder, says)


BESIDE: dict[str, tuple[dict[str, bytes | dict[str, Any]], str]] = {
    "settings that are no JSON": ({"tokenizer_config.json": b"{"}, "tokenizer_config.json is not valid JSON"),
    "settings that are a list": ({"tokenizer_config.json": b"[]"}, "tokenizer_config.json holds a JSON list"),
    "settings that nest": ({"tokenizer_config.json": DEEP.encode()}, "nested too deeply"),
    **{
        f"{name} {value!r}": ({"tokenizer_config.json": {name: value}}, f"{name} is .* it must be a text")
        for name in ("bos_token", "eos_token", "pad_token")
        for value in (1, ["x"], {"content": 1}, {"a": "b"})
    },
    "an end token of another model": ({"tokenizer_config.json": {"eos_token": "[SEP]"}}, r"'\[SEP\]', which tokenizer.json does not"),
    "a begin token of another model": ({"tokenizer_config.json": {"bos_token": "[CLS]"}}, r"'\[CLS\]', which tokenizer.json does not"),
    "a template that is a number": ({"tokenizer_config.json": {"chat_template": 1}}, "chat_template is not a text"),
    "a template that is an object": ({"tokenizer_config.json": {"chat_template": {"a": "b"}}}, "chat_template is not a text"),
    "templates that are numbers": ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": 1}]}}, "not a text"),
    "a template that is no text": ({"chat_template.jinja": b"\xff\xfe"}, "chat_template.jinja cannot be read"),
    "a template of 2 MB": ({"chat_template.jinja": b"x" * 2_000_000}, "more than 1000000 bytes"),
    "end tokens that are no JSON": ({"generation_config.json": b"{"}, "generation_config.json is not valid JSON"),
    "end tokens that nest": ({"generation_config.json": DEEP.encode()}, "nested too deeply"),
    "an end token twice": ({"generation_config.json": b'{"eos_token_id": 1, "eos_token_id": 2}'}, "'eos_token_id' stands twice"),
    **{
        f"end tokens {value!r}": ({"generation_config.json": {"eos_token_id": value}}, "eos_token_id")
        for value in ("x", 1.0, True, [1, None], {"a": 1}, VOCAB, [1, -1], 2**63)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_a_damaged_file_beside_is_refused(case: str, files: Files, tmp_path: Path) -> None:
    changed, says = BESIDE[case]
    raw = {name: json.dumps(one).encode() if isinstance(one, dict) else one for name, one in changed.items()}
    folder = write(tmp_path / "m", files | raw)
    assert str(folder) in refusal(folder, says)


def test_tokens_that_were_added_without_a_row_are_told_and_texts_with_them_refused(
    files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many fine-tunes have a padding token that their embedding lacks: nobody needs it, so nobody is stopped."""
    added = json.loads(tokenizer_json())["added_tokens"]
    pad = added[0] | {"id": VOCAB, "content": "[PAD]"}
    folder = write(tmp_path / "m", files | {"tokenizer.json": tokens(added_tokens=[*added, pad])})
    models = load(folder)
    assert ("unusable_tokens", (VOCAB,)) in [note[:2] for note in models.notes]
    assert "'[PAD]'" in caplog.text
    assert models.vocab_size == VOCAB
    assert models.tokenizer.encode("w3 [PAD]") == [3, VOCAB]  # which is no token of the model's: the request is refused


def test_a_text_that_a_tokenizer_cannot_read_ends_its_own_request(tmp_path: Path) -> None:
    """The library panics where an expression takes too long; that is no Exception, and would end a thread."""
    tokenizer = load_tokenizer(write(tmp_path / "m", {"tokenizer.json": tokens(pre_tokenizer=SPLIT)}))
    assert tokenizer.encode("w3") == [3]
    with pytest.raises(RequestError, match=r"tokenizer of .* cannot read this text: .*retry-limit"):
        tokenizer.encode("a" * 40 + "b")
    writes = {"type": "Replace", "pattern": {"Regex": "(w+)+$"}, "content": ""}
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "w" * 40 + "b": 3}, "unk_token": "a"}
    changed = tokens(decoder=writes, model=model, added_tokens=[])
    tokenizer = load_tokenizer(write(tmp_path / "n", {"tokenizer.json": changed}))
    with pytest.raises(EngineError, match=r"tokenizer of .* cannot write these tokens: .*retry-limit"):
        tokenizer.decode([3])


# ------------------------------------------------------------------------------------------------------------ decisions


@pytest.mark.parametrize("kind", ["calibration", "profile"])
def test_anything_in_any_field_of_a_file_of_ours(kind: str, tmp_path: Path) -> None:
    """Calibrations come with drafters, profiles from other machines: a ConfigError that names the file, or values."""
    path, read = tmp_path / "file.json", Calibration.load if kind == "calibration" else CostProfile.load
    if kind == "calibration":
        Calibration(temperatures={("head", "greedy"): (1.0, 0.5)}, weights={("head", "greedy"): "a"}).save(path)
        whole = json.loads(path.read_text())
    else:
        whole = json.loads(json.dumps(a_profile().to_dict()))
    for changed in variants(whole, step=2):
        path.write_text(json.dumps(changed))
        with contextlib.suppress(ConfigError):
            read(path)
    for raw in (
        b"",
        b"{",
        b"\xff",
        DEEP.encode(),
        b"[]",
        b'{"version": 1, "version": 2}',
        b"[" + b"[]," * 999_999 + b"1]",
    ):
        path.write_bytes(raw)
        with pytest.raises(ConfigError, match=r"file\.json"):
            read(path)


def test_a_calibration_that_is_a_link_out_of_its_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "calibration.json").symlink_to("../secret")
    with pytest.raises(CheckpointError, match="is a link"):
        find_calibration(None, tmp_path / "drafter")
    assert find_calibration(tmp_path / "secret", tmp_path / "drafter") == tmp_path / "secret"


def test_inspect_finds_the_same(files: Files, tmp_path: Path) -> None:
    for field, value in {"hidden_size": 16, "num_hidden_layers": 7, "attention_bias": True}.items():
        folder = write(tmp_path / field, files | {"config.json": config(**{field: value}).encode()})
        with pytest.raises(CheckpointError, match="tensor"):
            describe(folder)


def test_frequencies_of_a_whole_config_are_numbers(files: Files, tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path / "m", files))
    assert inverse_frequencies(spec.rope, spec.head_dim).dtype == torch.float32
