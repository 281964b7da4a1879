"""Folders of every dialect: what we export reads back as the same drafter, and what others write is read or refused."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.checkpoint import DrafterSpec, expected_tensors, read_checkpoint, spec_from_config
from slipstream.models.decoder import Decoder
from slipstream.models.dialect_configs import deepspec_config, speculators_config, z_lab_config
from slipstream.models.drafters import BlockDrafter, load_drafter, save_drafter
from slipstream.models.export import ExportTarget, export_drafter
from slipstream.models.inspect import describe
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import FULL, SLIDING, DecoderSpec
from tests.models.folders import configure, drafts, edit, rename, shard, write_target
from tests.models.test_checkpoint import DEEPSPEC, SPECFORGE, SPECULATORS, TAPS, Z_LAB

Make = Callable[..., DrafterSpec]
KEPT = torch.tensor([0, 3, 4, 9, 17, 20, 33, 41, 42, 63])  # draft ids 0..9 as target ids


@pytest.fixture
def target_folder(tmp_path: Path, target_spec: DecoderSpec) -> Path:
    write_target(tmp_path / "target", dataclasses.replace(target_spec, tie_word_embeddings=False))
    return tmp_path / "target"


@pytest.fixture
def target(target_folder: Path, target_spec: DecoderSpec) -> Decoder:
    return Decoder(dataclasses.replace(target_spec, tie_word_embeddings=False), torch.float32).init_random(1)


def save(folder: Path, spec: DrafterSpec, target: Decoder, dtype: torch.dtype = torch.float32) -> BlockDrafter:
    """A random drafter in our own form, as it reads back."""
    drafter = BlockDrafter(spec, torch.float32).init_random(2, std=0.3)
    if spec.draft_vocab_size is not None:
        drafter.set_draft_vocabulary(KEPT)
    drafter.share(target)
    save_drafter(drafter, folder, {"made": "for a test"}, dtype)
    return load_drafter(folder, target)


def assert_same_drafts(one: BlockDrafter, other: BlockDrafter) -> None:
    """Token by token, and bit by bit in what the heads read."""
    for mine, theirs in zip(drafts(one), drafts(other), strict=True):
        assert torch.equal(mine, theirs)


# --- what we write ----------------------------------------------------------------------------------------------------

FILL_IN: dict[str, Any] = {"algorithm": "dflash", "layout": "fill_in"}
ANCHOR_FIRST: dict[str, Any] = {"algorithm": "dflash", "layout": "anchor_first"}
HEADS: dict[str, Any] = {"markov_rank": 6, "confidence_head": True, "confidence_with_markov": True}
DSPARK: dict[str, Any] = {"algorithm": "dspark", "layout": "anchor_first", **HEADS}
SAYABLE = [
    ("z-lab", FILL_IN),
    ("z-lab", FILL_IN | {"layer_types": (SLIDING, FULL), "sliding_window": 6, "attention_bias": True}),
    ("z-lab", FILL_IN | {"rope": RopeSpec(theta=1e4, scaling="yarn", factor=4.0, original_max_position=32)}),
    ("deepspec", ANCHOR_FIRST),
    ("deepspec", DSPARK),
    ("deepspec", DSPARK | {"markov_head_type": "gated", "confidence_bias": False}),
    ("deepspec", DSPARK | {"markov_head_type": "rnn", "confidence_with_markov": False}),
    ("deepspec", DSPARK | {"markov_rank": 0, "confidence_with_markov": False}),
    ("speculators", FILL_IN),
    ("speculators", ANCHOR_FIRST | {"draft_vocab_size": 10}),
    ("speculators", DSPARK | {"draft_vocab_size": 10}),
    ("speculators", DSPARK | {"layout": "fill_in", "markov_head_type": "rnn", "draft_vocab_size": 10}),
    ("speculators", DSPARK | {"layer_types": (SLIDING, FULL), "sliding_window": 6, "confidence_bias": False}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dialect", "changes"), SAYABLE)
def test_an_exported_drafter_drafts_the_same(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path, dialect: str, changes: dict[str, Any],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """In every dialect that can say it; with bf16 files and an fp32 target too, whose tables are then rounded copies."""
    mine = save(tmp_path / "mine", drafter_spec(**changes), target, dtype)
    written = export_drafter(tmp_path / "mine", tmp_path / "theirs", dialect, ExportTarget.at(target_folder))
    assert written.dialect == dialect
    theirs = load_drafter(tmp_path / "theirs", target)
    assert_same_drafts(mine, theirs)
    assert not theirs.spec.own_embedding  # copies of the target's are recognised, so they cost no memory
    assert not theirs.spec.own_head
    report = describe(tmp_path / "theirs")
    assert (report["dialect"], report["layout"]) == (dialect, changes["layout"])
    assert "slipstream" not in json.loads((tmp_path / "theirs" / "config.json").read_text())


def test_the_dialects_of_one_network_draft_the_same(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    """z-lab's and DeepSpec's folder of the same weights, in both layouts: each dialect says one, the other by a flag."""
    for layout, dialect, other in (("anchor_first", "deepspec", "z-lab"), ("fill_in", "z-lab", "deepspec")):
        mine = save(tmp_path / f"{dialect}-mine", drafter_spec(layout=layout), target)
        first, second = tmp_path / dialect, tmp_path / f"{dialect}-as-{other}"
        export_drafter(tmp_path / f"{dialect}-mine", first, dialect, ExportTarget.at(target_folder))
        shutil.copytree(first, second)
        if other == "z-lab":
            edit(second, lambda tensors: [tensors.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")])
            flagged = dataclasses.replace(mine.spec, layout="fill_in")
            (second / "config.json").write_text(json.dumps(z_lab_config(flagged) | {"sample_from_anchor": True}))
        else:
            tables = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.head_weight}
            edit(second, lambda tensors, tables=tables: tensors.update(tables))  # type: ignore[misc]
            flagged = dataclasses.replace(mine.spec, layout="anchor_first")
            (second / "config.json").write_text(json.dumps(deepspec_config(flagged) | {"sample_from_anchor": False}))
        one, two = load_drafter(first, target), load_drafter(second, target)
        assert (one.spec.dialect, two.spec.dialect) == (dialect, other)
        assert one.spec.layout == two.spec.layout == layout
        assert_same_drafts(one, two)
        assert_same_drafts(one, mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_targets_table_is_written_twice(
    drafter_spec: Make, target_spec: DecoderSpec, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Its files hold one table, a DeepSpec folder two equal ones; both are recognised as the target's."""
    target = write_target(tmp_path / "tied", target_spec, dtype)
    mine = save(tmp_path / "mine", drafter_spec(**DSPARK), target)
    export_drafter(tmp_path / "mine", tmp_path / "out", "deepspec", ExportTarget.at(tmp_path / "tied"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], tensors["lm_head.weight"])
    theirs = load_drafter(tmp_path / "out", target)
    assert (theirs.spec.own_embedding, theirs.spec.own_head) == (False, False)
    assert_same_drafts(mine, theirs)


def test_a_z_lab_folder_is_what_z_lab_writes(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    """Five layers make 58 tensors with z-lab's names, no tables, and only keys of its config."""
    save(tmp_path / "mine", drafter_spec(num_layers=5, layer_types=(FULL,) * 5), target)
    export_drafter(tmp_path / "mine", tmp_path / "out", "z-lab")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    layer += tuple(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))
    names = {f"layers.{i}.{name}.weight" for i in range(5) for name in layer}
    assert tensors.keys() == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(tensors) == 58
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 3, "target_layer_ids": [0, 2]}
    assert (config["block_size"], config["num_target_layers"], config["num_hidden_layers"]) == (5, 4, 5)
    assert config.keys() <= Z_LAB.keys()


def test_a_deepspec_folder_has_what_deepspec_asks_for(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    """Flat fields without which its model does not start, and frozen copies of both tables."""
    save(tmp_path / "mine", drafter_spec(**DSPARK, confidence_bias=False), target)
    export_drafter(tmp_path / "mine", tmp_path / "out", "deepspec", ExportTarget.at(target_folder))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config.keys() <= DEEPSPEC.keys()
    asked = {"target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank"}
    assert asked | {"markov_head_type", "confidence_head_with_markov", "block_size"} <= config.keys()
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.embed_tokens.weight)
    assert torch.equal(tensors["lm_head.weight"], target.head_weight)
    assert tensors["confidence_head.proj.bias"].tolist() == [0]  # its head always has one


def test_a_speculators_folder_counts_hidden_states_and_keeps_rows_of_the_head(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    save(tmp_path / "mine", drafter_spec(**DSPARK, draft_vocab_size=10), target)
    (tmp_path / "mine" / "calibration.json").write_text('{"version": 1, "signals": {}}')
    export_drafter(tmp_path / "mine", tmp_path / "out", "speculators", ExportTarget.at(target_folder, "someone/target"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    assert (config["sample_from_anchor"], config["draft_vocab_size"]) == (True, 10)
    assert config["transformer_layer_config"]["vocab_size"] == 64
    known = config["speculators_config"]
    assert known["proposal_methods"][0]["speculative_tokens"] == 5
    assert known["verifier"] == {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(torch.arange(10) + tensors["d2t"], KEPT)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), KEPT)
    assert torch.equal(tensors["lm_head.weight"], target.head_weight[KEPT])
    assert (tmp_path / "out" / "calibration.json").is_file()


@pytest.mark.parametrize(
    ("dialect", "changes", "message"),
    [
        ("z-lab", DSPARK, "a Markov or confidence head cannot be said in the dialect z-lab; export to deepspec"),
        ("z-lab", ANCHOR_FIRST, "anchor_first cannot be said in the dialect z-lab; export to deepspec or speculators"),
        ("z-lab", FILL_IN | {"draft_vocab_size": 10}, r"reduced vocabulary \(10 of 64 tokens\).*export to speculators"),
        ("z-lab", FILL_IN | {"target_layer_ids": (0, 3)}, "target layer 3 is the last of 4"),
        ("deepspec", FILL_IN, "fill_in cannot be said in the dialect deepspec; export to z-lab or speculators"),
        ("deepspec", DSPARK | {"draft_vocab_size": 10}, "reduced vocabulary .*export to speculators"),
        ("deepspec", ANCHOR_FIRST | {"layer_types": (SLIDING, FULL), "sliding_window": 6}, "sliding windows"),
        ("deepspec", DSPARK | {"target_layer_ids": (0, 3)}, "target layer 3 is the last of 4"),
        ("speculators", FILL_IN | {"target_layer_ids": (3,)}, "target layer 3 is the last of 4"),
    ],
)
def test_what_a_dialect_cannot_say_is_refused(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path, dialect: str, changes: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    save(tmp_path / "mine", drafter_spec(**changes), target)
    with pytest.raises(CheckpointError, match=message):
        export_drafter(tmp_path / "mine", tmp_path / "out", dialect, ExportTarget.at(target_folder))
    assert not (tmp_path / "out").exists()


def test_own_tables_go_where_they_can_be_said(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    """Copies of the target's are left out of a z-lab folder; trained ones are refused there and kept elsewhere."""
    export_target = ExportTarget.at(target_folder)
    mine = save(tmp_path / "mine", drafter_spec(), target)
    copies = {"embed_tokens.weight": target.embed_tokens.weight.clone(), "lm_head.weight": target.head_weight.clone()}
    edit(tmp_path / "mine", lambda tensors: tensors.update(copies))
    with pytest.raises(ConfigError, match=r"embed_tokens.weight and lm_head.weight.*--model"):
        export_drafter(tmp_path / "mine", tmp_path / "out", "z-lab")
    export_drafter(tmp_path / "mine", tmp_path / "out", "z-lab", export_target)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert_same_drafts(load_drafter(tmp_path / "out", target), mine)

    edit(tmp_path / "mine", lambda tensors: tensors["lm_head.weight"].mul_(-1))
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from the target's.*deepspec or speculators"):
        export_drafter(tmp_path / "mine", tmp_path / "out2", "z-lab", export_target)
    export_drafter(tmp_path / "mine", tmp_path / "kept", "speculators", export_target)
    assert_same_drafts(load_drafter(tmp_path / "kept", target), trained := load_drafter(tmp_path / "mine", target))
    assert not torch.equal(drafts(trained)[0], drafts(mine)[0])


def test_mistakes_in_an_export_are_named(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    save(tmp_path / "mine", drafter_spec(**DSPARK), target)
    for dialect in ("deepspec", "speculators"):
        with pytest.raises(ConfigError, match="name it with --model"):
            export_drafter(tmp_path / "mine", tmp_path / "out", dialect)
    with pytest.raises(ConfigError, match="dialect is 'eagle'; choose one of z-lab, deepspec, speculators"):
        export_drafter(tmp_path / "mine", tmp_path / "out", "eagle")
    with pytest.raises(ConfigError, match="exists already and is not empty"):
        export_drafter(tmp_path / "mine", tmp_path / "mine", "deepspec", ExportTarget.at(target_folder))
    other = ExportTarget.at(target_folder)
    other = dataclasses.replace(other, spec=dataclasses.replace(other.spec, hidden_size=48))
    with pytest.raises(CheckpointError, match="does not fit the target"):
        export_drafter(tmp_path / "mine", tmp_path / "out", "deepspec", other)


def test_written_configs_of_qwen3_8b_have_the_published_counts() -> None:
    """58 tensors and 1,048,626,432 values for z-lab, 2,371,081,729 for DeepSpec, from config and shape rules alone."""
    z_lab = spec_from_config(z_lab_config(spec_from_config(Z_LAB)))
    shapes = expected_tensors(z_lab)
    assert (len(shapes), sum(map(_values, shapes.values()))) == (58, 1_048_626_432)
    deepspec = spec_from_config(deepspec_config(spec_from_config(DEEPSPEC)))
    shapes = expected_tensors(dataclasses.replace(deepspec, own_embedding=True, own_head=True))
    assert sum(map(_values, shapes.values())) == 2_371_081_729
    nested = spec_from_config(speculators_config(spec_from_config(DEEPSPEC), "Qwen/Qwen3-8B", "Qwen3ForCausalLM"))
    assert expected_tensors(nested) == expected_tensors(deepspec)


def _values(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


# --- what others write ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["z-lab", "deepspec", "speculators"])
def theirs(
    request: pytest.FixtureRequest, drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path
) -> Path:
    """A folder of each dialect."""
    changes = {"z-lab": FILL_IN, "deepspec": DSPARK, "speculators": DSPARK | {"draft_vocab_size": 10}}[request.param]
    save(tmp_path / "mine", drafter_spec(**changes), target)
    export_drafter(tmp_path / "mine", tmp_path / "theirs", request.param, ExportTarget.at(target_folder))
    return tmp_path / "theirs"


def test_prefixes_make_no_difference(theirs: Path, target: Decoder) -> None:
    want = load_drafter(theirs, target)
    for old, new in (
        ("", "model."),
        ("model.markov_head.", "logit_head.markov_head."),
        ("model.layers.0.", "midlayer."),
        ("model.fc.", "encoder.fc."),
        ("model.hidden_norm.", "encoder.output_norm_enc."),
    ):
        edit(theirs, rename(old, new))
        assert_same_drafts(load_drafter(theirs, target), want)


def test_the_order_of_shards_makes_no_difference(theirs: Path, target: Decoder, tmp_path: Path) -> None:
    want = load_drafter(theirs, target)
    for backwards in (False, True):
        copy = tmp_path / f"shards-{backwards}"
        shutil.copytree(theirs, copy)
        shard(copy, backwards)
        assert_same_drafts(load_drafter(copy, target), want)
        (copy / "model-00001-of-00002.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model-00001-of-00002.safetensors, which is missing"):
            load_drafter(copy, target)


def test_each_missing_tensor_is_named_and_a_surplus_one_too(theirs: Path, target: Decoder) -> None:
    """Tables may be absent (they are then the target's), and so may what only training needs."""
    headers = read_checkpoint(theirs)[1]
    optional = {"embed_tokens.weight", "lm_head.weight", "t2d", "confidence_head.proj.bias"}
    whole = load_file(theirs / "model.safetensors")
    for name in headers.keys() - optional:
        edit(theirs, lambda tensors, name=name: tensors.pop(name))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match=rf"tensor {name} .*missing|tensor {name} is missing"):
            load_drafter(theirs, target)
        edit(theirs, lambda tensors, name=name: tensors.update({name: whole[name]}))  # type: ignore[misc]
    edit(theirs, lambda tensors: tensors.update({"layers.2.input_layernorm.weight": torch.ones(32)}))
    with pytest.raises(CheckpointError, match=r"layers.2.input_layernorm.weight is surplus"):
        load_drafter(theirs, target)


def test_leftovers_of_training_change_nothing(theirs: Path, target: Decoder) -> None:
    """Tensors of the target that old speculators files keep, and files that are never opened."""
    want = load_drafter(theirs, target)
    left: dict[str, Tensor] = {
        "verifier_lm_head.weight": torch.zeros(64, 32), "verifier_norm.weight": torch.zeros(32),
        "t2d": torch.zeros(64, dtype=torch.bool),
    }  # fmt: skip
    edit(theirs, lambda tensors: tensors.update(left))
    for name in ("training_state.rank0.pt", "train_config.py", "optimizer.bin"):
        (theirs / name).write_bytes(b"not what it says")
    assert_same_drafts(load_drafter(theirs, target), want)


def test_tables_are_shared_when_they_are_the_targets_and_kept_when_not(theirs: Path, target: Decoder) -> None:
    ids = KEPT if read_checkpoint(theirs)[0].draft_vocab_size else torch.arange(64)
    want = load_drafter(theirs, target)
    half = {"embed_tokens.weight": target.embed_tokens.weight, "lm_head.weight": target.head_weight[ids]}
    edit(theirs, lambda tensors: tensors.update({name: table.bfloat16() for name, table in half.items()}))
    shared = load_drafter(theirs, target)  # a copy that was rounded is a copy all the same
    assert (shared.spec.own_embedding, shared.spec.own_head) == (False, False)
    assert_same_drafts(shared, want)
    edit(theirs, lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(64, 32)}))
    kept = load_drafter(theirs, target)
    assert (kept.spec.own_embedding, kept.spec.own_head) == (True, False)
    assert torch.equal(kept.embedding_weight, torch.ones(64, 32))
    assert not torch.equal(drafts(kept)[1], drafts(want)[1])


def test_a_tied_file_with_a_table_and_no_head_is_refused(theirs: Path, target: Decoder) -> None:
    """transformers would read the table as the head, vLLM the target's head; without a table there is no question."""
    body = json.loads((theirs / "config.json").read_text()).get("transformer_layer_config")
    where = (
        {"transformer_layer_config": body | {"tie_word_embeddings": True}} if body else {"tie_word_embeddings": True}
    )
    edit(theirs, lambda tensors: [tensors.pop(name, None) for name in ("embed_tokens.weight", "lm_head.weight")])
    configure(theirs, **where)
    load_drafter(theirs, target)
    edit(theirs, lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(64, 32)}))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true.*store lm_head.weight"):
        load_drafter(theirs, target)


def test_a_mask_vector_in_a_pickle_is_refused_and_never_opened(theirs: Path, target: Decoder) -> None:
    (theirs / "mask_embedding.pt").write_bytes(b"cposix\nsystem\n")
    for read in (lambda: load_drafter(theirs, target), lambda: describe(theirs)):
        with pytest.raises(CheckpointError, match=r"mask_embedding.pt holds a mask vector.*never opened"):
            read()


def test_weights_in_a_pickle_are_refused(theirs: Path, target: Decoder) -> None:
    (theirs / "model.safetensors").rename(theirs / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle and is never opened"):
        load_drafter(theirs, target)


@pytest.mark.parametrize(
    ("tensor", "network"),
    [
        ("layers.0.attention_conv.weight", "DFlash2"),
        ("candidate_selector.proj.weight", "DFlash2"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("context_proj.weight", "DFlare"),
        ("hidden_correction.up.weight", "DFly"),
        ("mtp.0.attn.weight", "DeepSeek-V4"),
        ("layers.0.self_attn.qkv_proj.weight", "fused projections"),
        ("mask_embedding", "mask vector of its own"),
        ("layers.0.self_attn.q_proj.weight_packed", "quantised weights"),
    ],
)
def test_a_tensor_gives_another_network_away(
    drafter_spec: Make, target: Decoder, tmp_path: Path, tensor: str, network: str
) -> None:
    save(tmp_path / "mine", drafter_spec(), target)
    edit(tmp_path / "mine", lambda tensors: tensors.update({tensor: torch.ones(3)}))
    with pytest.raises(CheckpointError, match=f"{tensor} is not supported: it belongs to .*{network}"):
        load_drafter(tmp_path / "mine", target)


# --- configs of others ------------------------------------------------------------------------------------------------


def speculators(**changes: Any) -> dict[str, Any]:
    return SPECULATORS | changes


BODY = SPECULATORS["transformer_layer_config"]
SLIDES: dict[str, Any] = {"layer_types": [SLIDING] * 5, "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Z_LAB | {"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel is not supported: DFlash2"),
        (Z_LAB | {"architectures": ["DominoDraftModel"]}, "DominoDraftModel is not supported: Domino"),
        (Z_LAB | {"architectures": ["DFlareDraftModel"]}, "DFlareDraftModel is not supported: DFlare"),
        (Z_LAB | {"architectures": ["Qwen3DFlyModel"]}, "Qwen3DFlyModel is not supported: DFly"),
        (speculators(speculators_model_type="dflash2"), "'dflash2' is not a block drafter that is supported: it is DF"),
        (speculators(speculators_model_type="domino"), "it is Domino"),
        (speculators(dflare_config={"target_layer_ids": [1]}), "dflare_config is not supported: it belongs to DFlare"),
        (Z_LAB | {"dflash_config": TAPS | {"projector_type": "domino"}}, "'domino' is not supported.*Domino"),
        (Z_LAB | {"dflash_config": TAPS | {"gru_hidden_dim": 64}}, "gru_hidden_dim is not supported.*Domino"),
        (DEEPSPEC | {"dspark_noise_token_id": 5}, "dspark_noise_token_id is not supported.*DeepSeek-V4"),
        (Z_LAB | {"pard_token": 5}, "the mask ids differ: mask_token_id 151669, pard_token 5; keep one"),
        (Z_LAB | {"dflash_config": {"mask_token": "<|MASK|>"}}, r"the text '<\|MASK\|>'; set mask_token_id to the id"),
        (DEEPSPEC | {"mask_token_id": "<m>"}, "the text '<m>'; set mask_token_id to the id"),
        (DEEPSPEC | {"mask_token_id": 151936}, "mask_token_id 151936 is outside the embedding table"),
        (Z_LAB | {"dflash_config": TAPS | {"input_embedding_scale": 8.0}}, "input_embedding_scale is not supported"),
        (Z_LAB | {"dflash_config": TAPS | {"causal": True}}, "dflash_config.causal=true with full layers"),
        (Z_LAB | {"causal": True}, "causal=true with full layers"),
        (Z_LAB | SLIDES | {"is_causal": False}, "is_causal=false with sliding layers"),
        (Z_LAB | SLIDES | {"dflash_config": TAPS | {"is_causal": False}}, "dflash_config.is_causal=false with sliding"),
        (speculators(hidden_size=1024), "hidden_size is 1024 at the top level and 2048 in transformer_layer_config"),
        (speculators(vocab_size=9), "vocab_size is 9 at the top level and 151936 in .* or its defaults"),
        (speculators(target_layer_ids=[2, 20, 39]), r"target_layer_ids is \[2, 20, 39\], aux.* is \[1, 19, 38\]"),
        (speculators(speculative_tokens=7), "speculative_tokens is 7 at the top level and 8 in speculators_config"),
        (speculators(speculators_config={"algorithm": "dflash"}), "'dspark', speculators_config.algorithm 'dflash'"),
        (speculators(aux_hidden_state_layer_ids=None), "lacks aux_hidden_state_layer_ids"),
        (speculators(sliding_window_non_causal=True, transformer_layer_config=BODY | {
            "layer_types": [SLIDING] * 3, "sliding_window": 8}), "sliding_window_non_causal=true is not supported"),
        (Z_LAB | {"rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}} | SLIDES | {
            "layer_types": [SLIDING, FULL, FULL, FULL, FULL]}, "differ by layer type"),
    ],
)  # fmt: skip
def test_a_config_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("flag", "count", "layout", "reason"),
    [
        (True, 5, "anchor_first", "flag sample_from_anchor=true"),
        (False, 4, "fill_in", "flag sample_from_anchor=false"),
        (None, 5, "anchor_first", "speculative_tokens=5 with block_size=5"),
        (None, 4, "fill_in", "speculative_tokens=4 with block_size=5"),
        (None, None, "fill_in", "speculators file without sample_from_anchor, so older than that flag"),
        (True, 2, "anchor_first", "flag sample_from_anchor=true"),  # a default for serving
    ],
)
def test_the_same_weights_with_the_flag_and_without(
    drafter_spec: Make, target: Decoder, target_folder: Path, tmp_path: Path, flag: bool | None, count: int | None,
    layout: str, reason: str,
) -> None:  # fmt: skip
    """Fault 24: the flag decides, then the count, then the age of the file; the reason says which."""
    save(tmp_path / "mine", drafter_spec(**DSPARK), target)
    export_drafter(tmp_path / "mine", tmp_path / "out", "speculators", ExportTarget.at(target_folder))
    configure(tmp_path / "out", sample_from_anchor=flag, speculators_config={
        "proposal_methods": [] if count is None else [{"speculative_tokens": count}]})  # fmt: skip
    report = describe(tmp_path / "out")
    assert (report["layout"], report["layout_reason"]) == (layout, reason)
    assert load_drafter(tmp_path / "out", target).spec.max_draft_tokens == (5 if layout == "anchor_first" else 4)


@pytest.mark.parametrize("dialect", ["z-lab", "deepspec", "speculators"])
def test_transformers_reads_the_same_layers(drafter_spec: Make, dialect: str) -> None:
    """Engines build the layers from a Qwen3Config of transformers; theirs must come out of our config as we meant it."""
    from transformers import Qwen3Config

    spec = drafter_spec(
        layout="fill_in" if dialect == "z-lab" else "anchor_first", head_dim=16, max_position_embeddings=128,
        rope=RopeSpec(theta=5e5, scaling="linear", factor=2.0),
    )  # fmt: skip
    config = {"z-lab": z_lab_config, "deepspec": deepspec_config}.get(dialect, lambda _: {})(spec)
    if dialect == "speculators":
        config = speculators_config(spec, "name", "LlamaForCausalLM")["transformer_layer_config"]
    theirs = Qwen3Config(**json.loads(json.dumps(config)))
    assert (theirs.hidden_size, theirs.intermediate_size, theirs.head_dim) == (32, 48, 16)
    assert (theirs.num_hidden_layers, theirs.num_attention_heads, theirs.num_key_value_heads) == (2, 4, 2)
    assert (theirs.vocab_size, theirs.max_position_embeddings, theirs.rms_norm_eps) == (64, 128, 1e-6)
    assert theirs.layer_types == [FULL, FULL]
    assert not theirs.attention_bias
    assert not theirs.tie_word_embeddings
    rope = RopeSpec.from_hf(theirs.to_dict())  # whichever spelling this version of transformers keeps
    assert (rope.theta, rope.scaling, rope.factor) == (5e5, "linear", 2.0)


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_the_mask_id_under_any_of_its_names(key: str) -> None:
    nested = {"target_layer_ids": TAPS["target_layer_ids"], key: 77, "mask_token": "<|MASK|>"}
    assert spec_from_config(Z_LAB | {"dflash_config": nested}).mask_token_id == 77
    flat = {name: value for name, value in DEEPSPEC.items() if name != "mask_token_id"}
    assert spec_from_config(flat | {key: 77}).mask_token_id == 77


def test_specforge_says_its_heads_in_other_words() -> None:
    """It always writes attention_mode, and a weight in the loss may be all that tells of a confidence head."""
    nested = SPECFORGE["dflash_config"] | {"attention_mode": "gqa", "confidence_head_alpha": 1.0, "l1_loss_alpha": 0.9}
    del nested["enable_confidence_head"]
    assert spec_from_config(SPECFORGE | {"dflash_config": nested}) == spec_from_config(SPECFORGE)
    nested |= {"confidence_head_alpha": 0.0, "confidence_head_with_markov": False}
    assert not spec_from_config(SPECFORGE | {"dflash_config": nested}).confidence_head
    with pytest.raises(CheckpointError, match="attention_mode 'mla' is not supported"):
        spec_from_config(SPECFORGE | {"dflash_config": nested | {"attention_mode": "mla"}})


def test_rope_by_layer_type_is_read_where_one_type_is_used() -> None:
    by_type = {FULL: {"rope_type": "default", "rope_theta": 5e5}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    config = {name: value for name, value in Z_LAB.items() if not name.startswith("rope")}
    assert spec_from_config(config | {"rope_parameters": by_type}).rope.theta == 5e5
    assert spec_from_config(config | SLIDES | {"rope_parameters": by_type}).rope.theta == 1e4


def test_the_same_value_in_two_places_is_no_conflict() -> None:
    said_twice = speculators(hidden_size=2048, target_layer_ids=[1, 19, 38], speculative_tokens=8, pard_token=9)
    assert spec_from_config(said_twice) == dataclasses.replace(
        spec_from_config(SPECULATORS), layout_reason="speculative_tokens=8 with block_size=8"
    )


@pytest.mark.parametrize(
    ("config", "dialect"),
    [
        (Z_LAB, "z-lab"),
        (DEEPSPEC, "deepspec"),
        (speculators(), "speculators"),
        (Z_LAB | {"dflash_config": TAPS | {"projector_type": "dspark"}}, "specforge"),
        (DEEPSPEC | {"slipstream": {}}, "slipstream"),
    ],
)
def test_the_dialect_is_told(config: dict[str, Any], dialect: str) -> None:
    assert spec_from_config(config).dialect == dialect
