"""Training on a GPU: block-sparse attention equals plain attention, and a compiled step trains as an eager one does."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from slipstream.models.decoder import Decoder
from slipstream.testing import tiny_spec
from slipstream.train.answers import AnswerSet
from slipstream.train.attend import Dense, Flex, PackedAttend, PackedBlockAttend, packed_block_mask
from slipstream.train.data import draw_blocks, pack
from slipstream.train.options import Recipe, TrainOptions
from slipstream.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    # torch's compiler recommends TF32 for products that are fp32 on purpose.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Its graph trees record an empty one to begin with.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]


def answers(count: int = 160) -> AnswerSet:
    """Random texts of 40 to 120 tokens, the first ten of which are prompt."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(40, 120, count)
    return AnswerSet(
        token_ids=rng.integers(5, 64, lengths.sum()).astype(np.int32), starts=np.cumsum([0, *lengths]),
        prompt_lengths=np.full(count, 10, np.int32), temperatures=np.zeros(count, np.float32),
        looping=np.zeros(count, np.bool_),
    )  # fmt: skip


def trainer(folder: Path, device: str) -> Trainer:
    spec = tiny_spec(hidden_size=64, head_dim=16, num_hidden_layers=3)
    target = Decoder(spec, torch.bfloat16 if device == "cuda" else torch.float32, device).init_random(3, std=0.1)
    recipe = Recipe(row_tokens=256, batch_rows=4, block_rows=256, short_block=4, held_out=8, target_layer_ids=(0, 1))
    given = TrainOptions(
        model="tiny", out=folder, steps=20, block_size=8, draft_vocab_size=48, markov_rank=8, recipe=recipe
    )
    return Trainer(given, target, answers(), Console(quiet=True))


def test_flex_equals_dense(tmp_path: Path) -> None:
    """The target's attention, and the drafter's over its context and blocks, in tiles and under the whole mask."""
    run = trainer(tmp_path, "cuda")
    rows = pack(answers(), 256)[0].take(torch.arange(3)).to("cuda")
    blocks = draw_blocks(rows, [4] * 40 + [8] * 12, seed=1)
    q, k, v = (torch.randn(3 * 256, heads, 16, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    attend = torch.compile(lambda attend, q, k, v: attend(0, q, k, v), dynamic=False)
    whole, tiled = PackedAttend(run.target, rows, Dense()), PackedAttend(run.target, rows, Flex())
    torch.testing.assert_close(attend(tiled, q, k, v), whole(0, q, k, v), atol=2e-2, rtol=2e-2)
    own_q, own_k, own_v = (t.view(3, 256, *t.shape[1:]) for t in (q, k, v))  # 256 block rows, as it happens
    whole, tiled = (
        PackedBlockAttend([(k, v)], packed_block_mask(rows, blocks, backend), backend) for backend in (Dense(), Flex())
    )
    ours, theirs = attend(tiled, own_q, own_k, own_v), whole(0, own_q, own_k, own_v)
    torch.testing.assert_close(ours[blocks.live], theirs[blocks.live], atol=2e-2, rtol=2e-2)


def test_compiled_steps_equal_eager_ones(tmp_path: Path) -> None:
    """Twenty steps, in bf16 as CUDA graphs and in fp32 one operation at a time: the losses stay together."""
    fast, plain = trainer(tmp_path / "a", "cuda"), trainer(tmp_path / "b", "cpu")
    ours, theirs = ([float(run.train_step()["l1"]) for _ in range(20)] for run in (fast, plain))
    assert ours[0] == pytest.approx(theirs[0], rel=0.02)  # anchors are drawn by the device's own generator
    assert ours[-1] < ours[0]
    assert ours[-1] == pytest.approx(theirs[-1], rel=0.05)
