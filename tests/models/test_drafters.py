"""The block drafter against plain re-implementations of its formulas, and its files against themselves."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.errors import CheckpointError
from slipstream.models.block_attend import DenseBlockAttend
from slipstream.models.checkpoint import DrafterSpec, expected_tensors
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter, load_drafter, save_drafter
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import FULL, SLIDING, DecoderSpec
from slipstream.models.weights import destinations
from slipstream.ops.attention import block_attention, plan_block

Make = Callable[..., DrafterSpec]
KEPT = torch.tensor([0, 3, 4, 9, 17, 20, 33, 41, 42, 63])  # draft ids 0..9 as target ids


@pytest.fixture
def target(target_spec: DecoderSpec) -> Decoder:
    return Decoder(target_spec).init_random(1)


def build(spec: DrafterSpec, target: Decoder, seed: int = 2) -> BlockDrafter:
    """Random weights large enough that every term of a formula shows."""
    drafter = BlockDrafter(spec).init_random(seed, std=0.3)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    if spec.draft_vocab_size is not None:
        drafter.set_draft_vocabulary(KEPT)
    drafter.share(target)
    return drafter


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the backbone -----------------------------------------------------------------------------------------------------


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def plain_rope(x: Tensor, position: int, theta: float) -> Tensor:
    """x [heads, hd], half rotation."""
    half = x.shape[-1] // 2
    angle = position / theta ** (torch.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def plain_block(
    spec: DrafterSpec, w: dict[str, Tensor], features: Tensor, context: list[int], embeds: Tensor, positions: list[int]
) -> Tensor:
    """Hidden rows of one block [n, H], row by row and head by head, context and block in one list of keys."""
    nh, nkv, hd, eps, theta = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rms_norm_eps, spec.rope.theta
    c = plain_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    x = embeds
    for layer in range(spec.num_layers):
        get = {name.removeprefix(f"layers.{layer}."): value for name, value in w.items()}
        u = plain_norm(x, get["input_layernorm.weight"], eps)

        def project(name: str, rows: Tensor, get: dict[str, Tensor] = get) -> Tensor:
            out = rows @ get[f"self_attn.{name}_proj.weight"].T
            bias = get.get(f"self_attn.{name}_proj.bias")
            return out if bias is None else out + bias

        where = context + positions
        both = torch.cat((c, u))
        keys = project("k", both).view(-1, nkv, hd)
        keys = plain_norm(keys, get["self_attn.k_norm.weight"], eps)
        keys = torch.stack([plain_rope(key, place, theta) for key, place in zip(keys, where, strict=True)])
        values = project("v", both).view(-1, nkv, hd)
        mixed = []
        for row, place in enumerate(positions):
            query = plain_norm(project("q", u[row]).view(nh, hd), get["self_attn.q_norm.weight"], eps)
            query = plain_rope(query, place, theta)
            seen = [index < len(context) or spec.layer_types[layer] == FULL for index in range(len(where))]
            if spec.layer_types[layer] == SLIDING:
                assert spec.sliding_window is not None
                seen = [place - (spec.sliding_window - 1) <= other <= place for other in where]
            for head in range(nh):
                shared = head // (nh // nkv)
                scores = keys[seen, shared] @ query[head] / hd**0.5
                mixed.append(scores.softmax(0) @ values[seen, shared])
        x = x + project("o", torch.stack(mixed).view(len(positions), nh * hd))
        y = plain_norm(x, get["post_attention_layernorm.weight"], eps)
        gate, up = y @ get["mlp.gate_proj.weight"].T, y @ get["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ get["mlp.down_proj.weight"].T
    return plain_norm(x, w["norm.weight"], eps)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "anchor_first", "block_size": 4},
        {"attention_bias": True},
        {"layer_types": (SLIDING, FULL), "sliding_window": 6},
        {"layer_types": (SLIDING, SLIDING), "sliding_window": 3, "layout": "anchor_first"},
        {"num_layers": 1, "layer_types": (FULL,), "target_layer_ids": (1, 2, 3), "head_dim": 16},
    ],
)
def test_block_forward_equals_a_plain_one(drafter_spec: Make, target: Decoder, changes: dict[str, Any]) -> None:
    spec = drafter_spec(**changes)
    drafter = build(spec, target)
    weights = destinations(drafter)
    # Two documents of 9 and 12 context rows in one pack; the anchors lie inside them, so later context must be hidden.
    lengths, anchors = (9, 12), (7, 12)
    features = randn(sum(lengths), len(spec.target_layer_ids) * 32, seed=3)
    places = torch.cat([torch.arange(length) for length in lengths])
    docs = torch.tensor([0] * 9 + [1] * 12)
    context = drafter.context_kv(features, places)
    rows = spec.rows(spec.max_draft_tokens)
    token_ids = torch.tensor([[11, *[spec.mask_token_id] * (rows - 1)], [12, *[spec.mask_token_id] * (rows - 1)]])
    positions = torch.tensor(anchors)[:, None] + torch.arange(rows)
    attend = DenseBlockAttend(spec, context, places, torch.tensor(anchors), docs, torch.arange(2))
    got = drafter.hidden(drafter.embed(token_ids), positions, attend)
    for block, anchor in enumerate(anchors):
        own = features[docs == block][:anchor]
        embeds = target.embed_tokens.weight[token_ids[block]]
        want = plain_block(spec, weights, own, list(range(anchor)), embeds, positions[block].tolist())
        torch.testing.assert_close(got[block], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drafter.base_logits(got), got @ target.head_weight.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("types", "moves"), [((SLIDING, SLIDING), False), ((SLIDING, FULL), True)])
def test_a_window_hides_what_lies_outside(
    drafter_spec: Make, target: Decoder, types: tuple[str, ...], moves: bool
) -> None:
    """Block at 40, W = 8: its rows see nothing before position 33; a full layer does."""
    spec = drafter_spec(layer_types=types, sliding_window=8)
    drafter = build(spec, target)
    places, anchors = torch.arange(40), torch.tensor([40])
    positions = anchors[:, None] + torch.arange(5)
    embeds = drafter.embed(torch.tensor([[11, 3, 3, 3, 3]]))

    def run(features: Tensor) -> Tensor:
        context = drafter.context_kv(features, places)
        return drafter.hidden(embeds, positions, DenseBlockAttend(spec, context, places, anchors))

    features = randn(40, 64)
    outside, inside = features.clone(), features.clone()
    outside[32] += 1.0
    inside[33] += 1.0
    assert torch.equal(run(outside), run(features)) != moves
    assert not torch.equal(run(inside), run(features))


@pytest.mark.parametrize("window", [None, 3, 8])
def test_paged_attention_of_a_block_equals_the_dense_one(drafter_spec: Make, window: int | None) -> None:
    """What the engine runs against what the trainer runs, for ragged contexts with stale values behind them."""
    types = (FULL, FULL) if window is None else (SLIDING, SLIDING)
    spec = drafter_spec(layer_types=types, sliding_window=window)
    lengths, page, blocks = torch.tensor([5, 0, 9]), 4, 3
    keys, values = randn(10, page, 2, 8, seed=1), randn(10, page, 2, 8, seed=2)  # 10 pages
    table = torch.tensor([[7, 2, 1], [0, 3, 4], [9, 5, 8]])
    q, k, v = randn(blocks, 4, 4, 8, seed=3), randn(blocks, 4, 2, 8, seed=4), randn(blocks, 4, 2, 8, seed=5)
    positions = lengths[:, None] + torch.arange(4)
    plan = plan_block(lengths, table, positions, 9, page, frozenset([window]), torch.float32)
    got = block_attention(q, k, v, keys, values, plan, 8**-0.5, window)
    flat = [pages[table].reshape(-1, 2, 8) for pages in (keys, values)]  # 12 places per block, the last ones stale
    places, docs = torch.arange(12).repeat(3), torch.arange(3).repeat_interleave(12)
    attend = DenseBlockAttend(spec, [(flat[0], flat[1])], places, lengths, docs, torch.arange(3))
    torch.testing.assert_close(got, attend(0, q, k, v))


def test_context_rows_do_not_depend_on_how_they_are_batched(drafter_spec: Make, target: Decoder) -> None:
    drafter = build(drafter_spec(attention_bias=True), target).double()
    features, places = randn(13, 64).double(), torch.arange(13)
    whole = drafter.context_kv(features, places)
    parts = [drafter.context_kv(features[a:b], places[a:b]) for a, b in ((0, 1), (1, 5), (5, 6), (6, 13))]
    for layer, (keys, values) in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[layer][0] for part in parts]), keys)
        torch.testing.assert_close(torch.cat([part[layer][1] for part in parts]), values)


def test_gradients_reach_every_weight(dspark_spec: Make, target: Decoder) -> None:
    spec = dspark_spec(markov_head_type="rnn", draft_vocab_size=10)
    drafter = build(spec, target)
    places, anchors = torch.arange(6), torch.tensor([4, 6])
    context = drafter.context_kv(randn(6, 64), places)
    embeds = drafter.embed(torch.tensor([[11, 3, 3, 3, 3], [12, 3, 3, 3, 3]]))
    positions = anchors[:, None] + torch.arange(5)
    hidden = drafter.hidden(embeds, positions, DenseBlockAttend(spec, context, places, anchors))
    previous = torch.tensor([[11, 5, 6, 7, 8], [12, 4, 3, 2, 1]])
    logits = drafter.base_logits(hidden).float() + drafter.markov_bias(previous, hidden)
    (logits.square().sum() + drafter.confidence(hidden, previous).sum()).backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert target.embed_tokens.weight.grad is None


def test_counts_of_the_published_files() -> None:
    """On the meta device: 58 tensors of 1,048,626,432 values (DFlash) and 2,371,081,729 values (DSpark), Qwen3-8B."""
    dflash = DrafterSpec(
        algorithm="dflash", layout="fill_in", layout_reason="test", block_size=16, num_layers=5, hidden_size=4096,
        intermediate_size=12288, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-6,
        rope=RopeSpec(theta=1e6), max_position_embeddings=64, layer_types=(FULL,) * 5,
        target_layer_ids=(1, 9, 17, 25, 33), target_hidden_size=4096, vocab_size=151936, mask_token_id=151669,
    )  # fmt: skip
    weights = destinations(BlockDrafter(dflash, torch.bfloat16, "meta"))
    assert len(weights) == 58
    assert sum(weight.numel() for weight in weights.values()) == 1_048_626_432
    dspark = dataclasses.replace(
        dflash, algorithm="dspark", layout="anchor_first", block_size=7, markov_rank=256, confidence_head=True,
        confidence_with_markov=True, own_embedding=True, own_head=True,
    )  # fmt: skip
    weights = destinations(BlockDrafter(dspark, torch.bfloat16, "meta"))
    assert sum(weight.numel() for weight in weights.values()) == 2_371_081_729


def test_module_and_file_agree_on_names_and_shapes(drafter_spec: Make) -> None:
    options = itertools.product(("vanilla", "gated", "rnn"), (0, 6), (None, 10), (False, True), (False, True))
    for kind, rank, reduced, confidence, flag in options:
        spec = drafter_spec(
            markov_head_type=kind, markov_rank=rank, draft_vocab_size=reduced, confidence_head=confidence,
            confidence_with_markov=confidence and flag and rank > 0, attention_bias=flag, own_embedding=flag,
            own_head=flag, confidence_bias=flag,
        )  # fmt: skip
        shapes = {name: tuple(place.shape) for name, place in destinations(BlockDrafter(spec, device="meta")).items()}
        expected = expected_tensors(spec)
        assert shapes == {name: shape for name, shape in expected.items() if name != "d2t"}


# --- the heads --------------------------------------------------------------------------------------------------------


def plain_biases(drafter: BlockDrafter, previous: list[int], hidden: Tensor) -> list[Tensor]:
    """The bias of each row, left to right, straight from the formulas; hidden [n, H] of the rows that take part."""
    w = destinations(drafter)
    w1, w2 = w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"]
    rank, biases = w1.shape[1], []
    state = torch.zeros(rank)
    for token, h in zip(previous, hidden, strict=True):
        e = w1[token]
        if drafter.spec.markov_head_type == "vanilla":
            biases.append(w2 @ e)
        elif drafter.spec.markov_head_type == "gated":
            gate = w["markov_head.gate_proj.weight"] @ torch.cat((h, e)) + w["markov_head.gate_proj.bias"]
            biases.append(w2 @ (torch.sigmoid(gate) * e))
        else:
            joint = w["markov_head.joint_proj.weight"] @ torch.cat((state, e, h)) + w["markov_head.joint_proj.bias"]
            gate, candidate, output = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
            biases.append(w2 @ torch.tanh(output))  # the output of this row, not the new state
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
    return biases


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("layout", ["fill_in", "anchor_first"])
@pytest.mark.parametrize("reduced", [None, 10])
def test_markov_head(dspark_spec: Make, target: Decoder, kind: str, layout: str, reduced: int | None) -> None:
    spec = dspark_spec(markov_head_type=kind, layout=layout, draft_vocab_size=reduced, block_size=5)
    drafter = build(spec, target)
    drafts = spec.max_draft_tokens
    hidden, anchors = randn(2, spec.rows(drafts), 32, seed=5), torch.tensor([11, 40])
    tokens = torch.tensor([[7, 50, 7, 33, 2], [63, 0, 1, 9, 9]])[:, :drafts]  # drafts, as target ids
    previous = torch.cat((anchors[:, None], tokens[:, :-1]), dim=1)  # [2, d]

    served, state = [], drafter.markov_start(hidden, anchors)
    rows = hidden[:, spec.draft_rows(drafts)]
    for j in range(drafts):
        bias, state = drafter.markov_step(state, previous[:, j], rows[:, j])
        served.append(bias)
    forced = drafter.markov_bias(previous, rows, drafter.markov_start(hidden, anchors))
    torch.testing.assert_close(forced, torch.stack(served, dim=1))
    for block in range(2):
        if layout == "fill_in":  # rows 0 and 1 both have the anchor as previous token; row 0 gives no draft
            full = [int(anchors[block]), *previous[block].tolist()]
            want = plain_biases(drafter, full, hidden[block])[1:]
            everything = drafter.markov_bias(torch.tensor([full]), hidden[block][None])[0]
            torch.testing.assert_close(everything[1:], forced[block])
        else:
            want = plain_biases(drafter, previous[block].tolist(), hidden[block])
        torch.testing.assert_close(forced[block], torch.stack(want), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_confidence_head(dspark_spec: Make, target: Decoder, with_markov: bool, bias: bool) -> None:
    drafter = build(dspark_spec(confidence_with_markov=with_markov, confidence_bias=bias), target)
    w = destinations(drafter)
    hidden, previous = randn(2, 3, 32), torch.tensor([[1, 2, 3], [4, 5, 6]])
    for dtype in (torch.float32, torch.bfloat16):
        got = drafter.to(dtype).confidence(hidden.to(dtype), previous)
        assert got.dtype == torch.float32
        w = destinations(drafter)
        for block, row in itertools.product(range(2), range(3)):
            inputs = hidden[block, row].to(dtype).float()
            if with_markov:
                inputs = torch.cat((inputs, w["markov_head.markov_w1.weight"][previous[block, row]].float()))
            want = w["confidence_head.proj.weight"][0].float() @ inputs
            want = want + w["confidence_head.proj.bias"][0].float() if bias else want
            torch.testing.assert_close(got[block, row], want)


def test_heads_run_under_autocast(dspark_spec: Make, target: Decoder) -> None:
    """A trainer with fp32 masters: matrices in bf16, confidence in fp32."""
    drafter = build(dspark_spec(markov_head_type="rnn"), target)
    hidden, previous = randn(2, 3, 32), torch.tensor([[1, 2, 3], [4, 5, 6]])
    with torch.autocast("cpu", torch.bfloat16):
        bias, confidence = drafter.markov_bias(previous, hidden), drafter.confidence(hidden, previous)
    assert bias.dtype == torch.bfloat16
    torch.testing.assert_close(confidence, drafter.confidence(hidden, previous))


# --- sharing and the reduced vocabulary -------------------------------------------------------------------------------


def test_reduced_vocabulary(dspark_spec: Make, target: Decoder) -> None:
    drafter = build(dspark_spec(draft_vocab_size=10), target)
    hidden = randn(2, 3, 32)
    logits = drafter.base_logits(hidden)
    assert logits.shape == (2, 3, 10)
    torch.testing.assert_close(logits, target.logits(hidden)[..., KEPT])
    assert torch.equal(drafter.to_target(torch.arange(10)), KEPT)
    assert torch.equal(drafter.d2t + torch.arange(10), KEPT)
    assert drafter.head_weight.is_contiguous()
    assert drafter.markov_step(None, torch.tensor([63]), hidden[:1, 0])[0].shape == (1, 10)  # W1 takes target ids


def test_nothing_is_copied_for_a_full_vocabulary(drafter_spec: Make, target: Decoder) -> None:
    drafter = build(drafter_spec(), target)
    assert drafter.embedding_weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    assert drafter.head_weight.data_ptr() == target.head_weight.data_ptr()
    assert torch.equal(drafter.to_target(torch.arange(5)), torch.arange(5))
    assert not {"embed_tokens.weight", "lm_head.weight"} & drafter.state_dict().keys()


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_bytes", [None, 5000])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn", None])
def test_save_and_load(
    drafter_spec: Make, dspark_spec: Make, target: Decoder, tmp_path: Path, kind: str | None, shard_bytes: int | None
) -> None:
    spec = drafter_spec() if kind is None else dspark_spec(markov_head_type=kind, draft_vocab_size=10)
    drafter = build(spec, target).bfloat16()
    save_drafter(drafter, tmp_path / "d", {"steps": 3}, max_shard_bytes=shard_bytes)
    files = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert len(files) == 2 if shard_bytes is None else len(files) > 3
    sizes = [path.stat().st_size for path in (tmp_path / "d").glob("*.safetensors")]
    assert shard_bytes is None or max(sizes) < 20000  # tensors of 12 kB stand alone
    assert json.loads((tmp_path / "d" / "config.json").read_text())["slipstream"] == {"steps": 3}

    read = load_drafter(tmp_path / "d", target, torch.bfloat16)
    assert dataclasses.replace(read.spec, layout_reason="test") == spec
    for name, weight in drafter.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    assert torch.equal(read.draft_token_ids, drafter.draft_token_ids)
    assert torch.equal(read.head_weight, drafter.head_weight)
    assert not any(parameter.requires_grad for parameter in read.parameters())


def test_saving_over_an_older_file_leaves_one_whole_drafter(
    drafter_spec: Make, target: Decoder, tmp_path: Path
) -> None:
    drafter = build(drafter_spec(), target)
    for shard_bytes in (5000, None, 9000, 5000):
        save_drafter(drafter, tmp_path, max_shard_bytes=shard_bytes)
        (tmp_path / "calibration.json").write_text("{}")  # not ours: stays
        load_drafter(tmp_path, target)
    assert (tmp_path / "calibration.json").exists()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_write_that_fails_leaves_the_old_file(
    drafter_spec: Make, target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = build(drafter_spec(), target)
    save_drafter(drafter, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(shard: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("slipstream.models.write.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_drafter(drafter, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


@pytest.fixture
def saved(dspark_spec: Make, target: Decoder, tmp_path: Path) -> Path:
    save_drafter(build(dspark_spec(draft_vocab_size=10), target), tmp_path)
    return tmp_path


def test_own_tables_are_shared_when_equal_and_kept_when_not(saved: Path, target: Decoder) -> None:
    edit(saved, lambda t: t.update({"embed_tokens.weight": target.embed_tokens.weight.clone()}))
    edit(saved, lambda t: t.update({"lm_head.weight": target.head_weight[KEPT].clone()}))
    drafter = load_drafter(saved, target)
    assert not drafter.spec.own_embedding
    assert not drafter.spec.own_head
    assert drafter.embedding_weight.data_ptr() == target.embed_tokens.weight.data_ptr()
    other = randn(10, 32)
    edit(saved, lambda t: t.update({"lm_head.weight": other}))
    drafter = load_drafter(saved, target)
    assert drafter.spec.own_head
    assert torch.equal(drafter.head_weight, other)


def test_a_prefix_makes_no_difference(saved: Path, target: Decoder) -> None:
    want = load_drafter(saved, target).state_dict()

    def prefixed(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    edit(saved, prefixed)
    got = load_drafter(saved, target).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_confidence_head_without_bias(saved: Path, target: Decoder) -> None:
    edit(saved, drop("confidence_head.proj.bias"))
    assert load_drafter(saved, target).spec.confidence_bias is False


def test_the_layout_can_be_overridden(saved: Path, target: Decoder) -> None:
    spec = load_drafter(saved, target, layout="fill_in").spec
    assert (spec.layout, spec.layout_reason, spec.max_draft_tokens) == ("fill_in", "set by the user", 4)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (KEPT.clone(), "d2t maps to target ids 0..72, outside 0..63; it must hold offsets"),  # ids instead of offsets
        (torch.full((10,), -1), "maps to target ids -1..8, outside"),
        (torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 0, 0]), "ascending target ids without repetition"),
        (torch.zeros(9, dtype=torch.int64), r"d2t has shape \[9\]"),
        (torch.zeros(10), "d2t has type F32"),
    ],
)
def test_a_wrong_d2t(saved: Path, target: Decoder, offsets: Tensor, message: str) -> None:
    edit(saved, lambda t: t.update({"d2t": offsets}))
    with pytest.raises(CheckpointError, match=message):
        load_drafter(saved, target)


def test_files_that_do_not_fit(saved: Path, target: Decoder, target_spec: DecoderSpec) -> None:
    wider = Decoder(dataclasses.replace(target_spec, hidden_size=48), device="meta")
    with pytest.raises(CheckpointError, match="draft hidden size"):
        load_drafter(saved, wider)
    edit(saved, lambda t: t.update({"fc.weight": torch.zeros(32, 96)}))
    with pytest.raises(CheckpointError, match="2 target layers x target hidden size 32"):
        load_drafter(saved, target)
    edit(saved, drop("fc.weight"))
    with pytest.raises(CheckpointError, match=r"tensor fc.weight \[32, 64\] is missing"):
        load_drafter(saved, target)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_drafter(saved / "nowhere", target)
    (saved / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cut short"):
        load_drafter(saved, target)
