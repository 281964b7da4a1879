"""Models whose weights are drawn at random: their shapes, their weights, and the tokenizer that is made up for them."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers

from slipstream.errors import CapacityError, CheckpointError
from slipstream.models import random_weights
from slipstream.models.checkpoint import default_target_layer_ids
from slipstream.models.decoder import Decoder
from slipstream.models.layers import DenseAttend
from slipstream.models.locate import built_in_drafters, resolve_drafter, resolve_target
from slipstream.models.random_weights import random_decoder, random_drafter
from slipstream.models.shapes import (
    TARGET_SHAPES,
    describe_shape,
    drafter_shape,
    num_values,
    published_dspark,
    shape_name,
    target_shape,
)
from slipstream.models.spec import DecoderSpec
from slipstream.models.synthetic import _byte_spellings, synthetic_tokenizer
from slipstream.testing import tiny_drafter_spec, tiny_spec

# Values of the published checkpoints, as their model cards and safetensors headers say.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512, "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}  # fmt: skip
CONFIG = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "eos_token_id": 5,
}  # fmt: skip


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


# ---- shapes


@pytest.mark.parametrize("name", TARGET_SHAPES)
def test_known_shapes_have_the_published_sizes(name: str) -> None:
    assert num_values(target_shape(name)) == PUBLISHED[name]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "attention_bias": True},
    ],
)
def test_num_values_counts_the_parameters_of_the_network(changes: dict[str, object]) -> None:
    spec = tiny_spec(str(changes.get("model_type", "llama")), **{k: v for k, v in changes.items() if k != "model_type"})
    assert num_values(spec) == sum(parameter.numel() for parameter in Decoder(spec, device="meta").parameters())


def test_names() -> None:
    assert shape_name("random:qwen3-8b") == "qwen3-8b"
    assert shape_name("random") == shape_name("random:") == ""
    for name in ("randomly", "./random", "models/random:x", "ngram", Path("folder")):
        assert shape_name(name) is None
    assert target_shape("Qwen3-8B") == target_shape("qwen3-8b")


def test_a_config_gives_its_shape_and_no_end_token(config_file: Path) -> None:
    spec = target_shape(str(config_file))
    assert (spec.family, spec.num_layers, spec.eos_token_ids) == ("qwen3", 3, ())
    assert target_shape(str(config_file.parent)) == spec


@pytest.mark.parametrize(
    ("shape", "says"),
    [("", "needs a shape"), ("gpt-5", "no shape 'gpt-5'.*qwen3-8b"), ("smollm2-135m-dspark", "config of a drafter")],
)
def test_what_is_no_target_is_refused(shape: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        target_shape(shape)


def test_the_published_dspark_is_that_of_the_published_files() -> None:
    """Layers, taps and values as DeepSpec's files for Qwen3-8B have them, less the two tables that are shared here."""
    spec = published_dspark(target_shape("qwen3-8b"))
    assert (spec.num_layers, spec.markov_rank, spec.layout) == (5, 256, "anchor_first")
    assert spec.target_layer_ids == (1, 9, 17, 25, 33)
    assert published_dspark(target_shape("qwen3-14b")).target_layer_ids == (1, 10, 19, 28, 37)
    assert spec.max_draft_tokens == 16
    meta = Decoder(target_shape("qwen3-8b"), dtype=torch.bfloat16, device="meta")
    network = random_weights.BlockDrafter(spec, torch.bfloat16, meta.embed_tokens.weight.device)
    assert sum(parameter.numel() for parameter in network.parameters()) == 2_371_081_729 - 1_244_659_712
    assert published_dspark(target_shape("qwen3-8b"), "fill_in").max_draft_tokens == 15


@pytest.mark.parametrize("depth", range(1, 12))
def test_taps_fit_targets_of_any_depth(depth: int) -> None:
    spec = published_dspark(tiny_spec(num_hidden_layers=depth))
    assert set(spec.target_layer_ids) <= set(range(depth))
    if depth >= 8:
        assert spec.target_layer_ids == default_target_layer_ids(depth, 5)


def test_a_drafter_of_a_config_or_a_built_in_name(tmp_path: Path) -> None:
    target = target_shape("smollm2-135m")
    for name, folder in built_in_drafters().items():
        spec = drafter_shape(name, target)
        assert spec == drafter_shape(str(folder), target) == drafter_shape(str(folder / "config.json"), target)
        assert (spec.draft_vocab_size, spec.own_head) == (16384, False)
    assert drafter_shape("smollm2-135m-dspark", target, "fill_in").layout == "fill_in"
    with pytest.raises(CheckpointError, match="no drafter"):
        drafter_shape("qwen3-8b", target)
    with pytest.raises(CheckpointError, match="no shape 'nothing'"):
        drafter_shape("nothing", target)


def test_a_drafter_of_another_width_has_tables_of_its_own() -> None:
    spec = drafter_shape("smollm2-135m-dspark", tiny_spec())
    assert spec.own_embedding
    assert spec.own_head


def test_inspect_tells_shapes() -> None:
    report = describe_shape("qwen3-8b")
    assert (report["kind"], report["weights"], report["values"]) == ("target", "random", PUBLISHED["qwen3-8b"])
    drafter = describe_shape("smollm2-135m-dspark")
    assert (drafter["kind"], drafter["algorithm"], drafter["weights"]) == ("drafter", "dspark", "random")
    with pytest.raises(CheckpointError, match="no layout"):
        describe_shape("qwen3-8b", "fill_in")


@pytest.mark.parametrize("resolve", [resolve_target, resolve_drafter])
def test_where_files_are_needed_random_weights_are_refused_by_name(resolve: type) -> None:
    for name in ("random", "random:qwen3-8b", Path("random")):
        with pytest.raises(CheckpointError, match=f"{name} has random weights"):
            resolve(name)


# ---- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_features_and_logits_are_finite_and_of_order_one(family: str, dtype: torch.dtype) -> None:
    spec = tiny_spec(family, num_hidden_layers=12, vocab_size=200, tie_word_embeddings=False)
    target = random_decoder(spec, dtype)
    ids = torch.arange(20)
    hidden, features = target(ids, ids, DenseAttend(spec), taps=(0, 11))
    logits = target.logits(hidden).float()
    assert features is not None
    assert bool(features.isfinite().all())
    assert 0.3 < float(logits.std()) < 3
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_equal_seeds_give_equal_weights() -> None:
    spec = tiny_spec("qwen2", mlp_bias=False)
    one, same, other = (random_decoder(spec, torch.bfloat16, seed=seed) for seed in (0, 0, 1))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        if a.ndim == 1:
            assert set(a.tolist()) == {0.0 if name.endswith("bias") else 1.0}
        else:
            assert not torch.equal(a, c)


def test_a_random_drafter_shares_the_tables_and_spreads_a_reduced_vocabulary() -> None:
    target = random_decoder(tiny_spec(hidden_size=576, vocab_size=49152, num_hidden_layers=30), torch.bfloat16)
    drafter = random_drafter(drafter_shape("smollm2-135m-dspark", target.spec), target)
    assert drafter.embedding_weight is not None
    assert drafter.embedding_weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    ids = drafter.draft_token_ids
    assert (len(ids), int(ids[0]), bool((ids.diff() > 0).all())) == (16384, 0, True)
    assert int(ids[-1]) > 49152 - 8
    assert torch.equal(drafter.head_weight, target.head_weight[ids])


def test_weights_that_no_machine_holds_are_refused() -> None:
    spec = tiny_spec(hidden_size=2**20, intermediate_size=2**22, num_hidden_layers=4000, head_dim=64)
    with pytest.raises(CapacityError, match=r"target's weights take .* GB"):
        random_decoder(spec, torch.bfloat16)
    target = random_decoder(tiny_spec(), torch.float32)
    drafter = tiny_drafter_spec(target.spec, hidden_size=2**20, intermediate_size=2**22, num_hidden_layers=4000)
    with pytest.raises(CapacityError, match=r"drafter's weights take .* GB"):
        random_drafter(drafter, target)


# ---- tokenizer


@pytest.mark.parametrize("vocab_size", [256, 257, 1000, 151936])
def test_any_text_comes_out_as_it_went_in(vocab_size: int) -> None:
    tokenizer = synthetic_tokenizer(vocab_size)
    text = "Hé llo\n\t 'don't' 你好 \U0001f600 \x00\x7f 12345"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_alphabet_is_that_of_byte_level_tokenizers() -> None:
    assert sorted(_byte_spellings()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_every_id_has_a_text_of_its_own() -> None:
    tokenizer = synthetic_tokenizer(20_000)
    words = {tokenizer.decode([token]) for token in range(256, 20_000)}
    assert len(words) == 20_000 - 256
    assert all(word.startswith(" ") and word[1:].isalpha() for word in words)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids, tokenizer.special_ids) == (20_000, (), frozenset())
    assert synthetic_tokenizer(20_000).decode([256, 9999]) == tokenizer.decode([256, 9999])


@pytest.mark.parametrize("vocab_size", [1, 2, 27, 64, 200])
def test_a_vocabulary_too_small_for_bytes_reads_what_it_can(vocab_size: int) -> None:
    tokenizer = synthetic_tokenizer(vocab_size)
    ids = tokenizer.encode("a bad é")
    assert all(0 <= token < vocab_size for token in ids)
    assert len(ids) == 8
    if vocab_size == 27:
        assert tokenizer.decode(ids) == "a bad   "


def test_what_a_stream_shows_adds_up() -> None:
    tokenizer = synthetic_tokenizer(600)
    ids = torch.randint(600, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    ids += tokenizer.encode("你好 \U0001f600")
    stream = tokenizer.stream()
    assert "".join([*(stream.push(token) for token in ids), stream.flush()]) == tokenizer.decode(ids)


def test_conversations_have_a_plain_template() -> None:
    tokenizer = synthetic_tokenizer(300)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    assert tokenizer.chat(turns) == "system: s\nuser: hi\nassistant:"


def test_a_spec_from_a_file_serves(config_file: Path) -> None:
    target = random_decoder(target_shape(str(config_file)), torch.float32)
    assert isinstance(target.spec, DecoderSpec)
    assert target.spec.vocab_size == 300
