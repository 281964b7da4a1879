"""The batch that kernels build is the one of device/batch.py; what is padding is harmless, and nothing else moves."""

import pytest
import torch
from torch import Tensor

from slipstream.cache.pages import NULL_PAGE, SCRATCH_PAGE
from slipstream.device import batch as reference
from slipstream.device.state import PlanOnDevice, SlotState, make_slot_state
from slipstream.kernels import batch
from slipstream.kernels.batch import Admissions, Rows
from slipstream.ops.shape_logits import Shaping
from slipstream.plan import MAX_EDITS

PAGE_SIZE = 4
MAX_LEN = 150
NUM_SLOTS = 60
FENCE = -77  # stands around every output: a write there went out of bounds
MARGIN = 64


@pytest.fixture(params=["one-turn", "many-turns"], autouse=True)
def turns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks make programs go around their loops more than once, as long prompts and many sequences would."""
    if request.param == "many-turns":
        monkeypatch.setattr(batch, "_BLOCK", 16)
        monkeypatch.setattr(batch, "_MAX_SEQUENCES_AT_ONCE", 16)
    # The interpreter is slow: one program a sequence, or a few where sequences are few.
    monkeypatch.setattr(batch, "_WANTED_PROGRAMS", 1 if request.param == "one-turn" else 30)


def random_state(device: str, seed: int = 0) -> SlotState:
    generator = torch.Generator().manual_seed(seed)
    state = make_slot_state(NUM_SLOTS, MAX_LEN, PAGE_SIZE, torch.device(device))
    for tensor, low, high in (
        (state.token_ids, 0, 1000), (state.context, 0, MAX_LEN // 3), (state.page_table, 2, 500),
        (state.shaping.edit_ids, 0, 1000), (state.shaping.num_edits, 0, 9),
    ):  # fmt: skip
        tensor[:-1] = torch.randint(low, high, tensor[:-1].shape, generator=generator).to(device, tensor.dtype)
    return state


def parts(state: SlotState) -> dict[str, Tensor]:
    """Every tensor of the state, by name."""
    own = {name: getattr(state, name) for name in SlotState.__slots__ if name != "shaping"}
    return own | {name: getattr(state.shaping, name) for name in Shaping.__slots__}


def fenced(num: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full((num + 2 * MARGIN,), FENCE, dtype=dtype, device=device)[MARGIN : MARGIN + num]


def fence_stands(view: Tensor) -> bool:
    whole = view.as_strided((view.numel() + 2 * MARGIN,), (1,), 0)
    return bool((whole[:MARGIN] == FENCE).all() and (whole[MARGIN + view.numel() :] == FENCE).all())


def fenced_rows(num_sequences: int, num_rows: int, num_outputs: int, num_tiles: int, device: str) -> Rows:
    plain = batch.make_rows(
        num_sequences=num_sequences, num_rows=num_rows, num_outputs=num_outputs, num_tiles=num_tiles, device="cpu"
    )
    views = {name: getattr(plain, name) for name in Rows.__slots__}
    return Rows(**{name: fenced(view.numel(), view.dtype, device).view(view.shape) for name, view in views.items()})


def random_plan(num_real: int, num_padded: int, seed: int, device: str) -> tuple[PlanOnDevice, Tensor]:
    """Some sequences decode, some are being prefilled (a few of them not to their end); the padding stands behind."""
    generator = torch.Generator().manual_seed(seed)
    count = num_real + num_padded
    slots = torch.full((count,), NUM_SLOTS)
    slots[:num_real] = torch.randperm(NUM_SLOTS, generator=generator)[:num_real]
    decodes = torch.rand(count, generator=generator) < 0.7
    given = torch.where(decodes, 1, torch.randint(2, 60, (count,), generator=generator))
    widths = torch.where(decodes, torch.randint(0, 8, (count,), generator=generator), 0)
    emits = decodes | (torch.rand(count, generator=generator) < 0.5)
    real = torch.arange(count) < num_real
    plan = PlanOnDevice(slots, torch.where(real, given, 0), emits & real, torch.zeros(count, dtype=torch.bool))
    moved = {name: getattr(plan, name).to(device) for name in PlanOnDevice.__slots__}
    return PlanOnDevice(**moved), torch.where(real, widths, 0).to(device)


def run_layout(state: SlotState, plan: PlanOnDevice, widths: Tensor, block_q: int, out: Rows) -> None:
    batch.layout(
        plan.slots, plan.num_given, plan.emits, widths,
        context=state.context, page_table=state.page_table, token_ids=state.token_ids,
        page_size=PAGE_SIZE, block_q=block_q, draft_stride=9, out=out,
    )  # fmt: skip


def expected_tiles(state: SlotState, plan: PlanOnDevice, widths: Tensor, block_q: int) -> list[list[int]]:
    """First row, rows, slot, position."""
    tiles, row = [], 0
    for slot, count in zip(plan.slots.tolist(), (plan.num_given + widths).tolist(), strict=True):
        for first in range(0, count, block_q):
            tiles.append([row + first, min(block_q, count - first), slot, int(state.context[slot]) + first])
        row += count
    return tiles


SIZES = [(1, 0, 0), (1, 0, 30), (1, 3, 8), (7, 1, 0), (13, 19, 77), (24, 0, 100), (0, 5, 12)]


@pytest.mark.parametrize(("num_real", "num_padded", "more"), SIZES)
def test_layout_equals_the_reference(num_real: int, num_padded: int, more: int, device: str) -> None:
    state = random_state(device)
    for seed, block_q in enumerate((1, 16)):
        plan, widths = random_plan(num_real, num_padded, seed, device)
        rows = plan.num_given + widths
        num_rows, num_outputs = int(rows.sum()), int(torch.where(plan.emits, widths + 1, 0).sum())
        tiles = expected_tiles(state, plan, widths, block_q)
        want = reference.layout(state, plan, widths, num_rows, num_outputs, PAGE_SIZE)
        out = fenced_rows(num_real + num_padded, num_rows + more, num_outputs + more, len(tiles) + more, device)
        run_layout(state, plan, widths, block_q, out)

        assert out.cu_outputs.tolist() == want.cu_outputs.tolist()
        for name in ("positions", "kv_slots"):
            assert getattr(out, name)[:num_rows].tolist() == getattr(want, name).tolist(), name
        for name in ("output_rows", "output_sequence", "output_offset"):
            assert getattr(out, name)[:num_outputs].tolist() == getattr(want, name).tolist(), name
        draft = want.row_offset - want.num_given[want.row_sequence]
        assert out.token_ids[:num_rows].tolist() == torch.where(draft < 0, want.token_ids, 0).tolist()
        index = torch.where(draft < 0, -1, 9 * want.row_sequence + draft)
        assert out.draft_index[:num_rows].tolist() == index.tolist()
        assert out.tiles.tolist() == tiles + more * [4 * [0]]
        assert batch.max_tiles(num_real + num_padded, num_rows, block_q) >= len(tiles)

        assert out.positions[num_rows:].tolist() == more * [0]
        assert out.token_ids[num_rows:].tolist() == more * [0]
        assert out.draft_index[num_rows:].tolist() == more * [-1]
        assert (out.kv_slots[num_rows:] // PAGE_SIZE).tolist() == more * [SCRATCH_PAGE]
        assert out.output_rows[num_outputs:].tolist() == more * [0]
        assert out.output_sequence[num_outputs:].tolist() == more * [-1]
        assert out.output_offset[num_outputs:].tolist() == more * [0]
        assert all(fence_stands(getattr(out, name)) for name in Rows.__slots__)


def test_layout_without_outputs_or_rows(device: str) -> None:
    """A step of prompts that do not end in it wants no outputs; a step may also be all padding, without any size."""
    state = random_state(device)
    plan, widths = random_plan(3, 0, 0, device)
    silent = PlanOnDevice(plan.slots, plan.num_given, torch.zeros_like(plan.emits), plan.teaches)
    out = fenced_rows(3, int((plan.num_given + widths).sum()), 0, 0, device)
    run_layout(state, silent, widths, 4, out)
    assert out.cu_outputs.tolist() == [0, 0, 0, 0]
    want = reference.layout(state, silent, widths, len(out.positions), 0, PAGE_SIZE)
    assert out.positions.tolist() == want.positions.tolist()
    nobody, nothing = random_plan(0, 2, 0, device)
    empty = fenced_rows(2, 0, 0, 0, device)
    run_layout(state, nobody, nothing, 4, empty)
    assert empty.cu_outputs.tolist() == [0, 0, 0]
    assert all(fence_stands(getattr(rows, name)) for rows in (out, empty) for name in Rows.__slots__)


def test_layout_stays_inside_when_the_rows_do_not_fit(device: str) -> None:
    state = random_state(device)
    plan, widths = random_plan(9, 0, 1, device)
    num_rows = int((plan.num_given + widths).sum())
    out = fenced_rows(9, num_rows - 5, 3, num_rows, device)
    run_layout(state, plan, widths, 4, out)
    want = reference.layout(state, plan, widths, num_rows, 3, PAGE_SIZE)
    assert out.positions.tolist() == want.positions[:-5].tolist()
    assert out.output_rows.tolist() == want.output_rows.tolist()
    ends = out.tiles[:, 0] + out.tiles[:, 1]
    assert int(ends[out.tiles[:, 1] > 0].max()) == num_rows - 5, "no tile has rows that are not there"
    few = fenced_rows(9, num_rows, 3, 2, device)
    run_layout(state, plan, widths, 4, few)
    assert few.tiles.tolist() == expected_tiles(state, plan, widths, 4)[:2]
    assert all(fence_stands(getattr(rows, name)) for rows in (out, few) for name in Rows.__slots__)


def test_rows_beyond_the_last_page_go_to_the_scratch_page(device: str) -> None:
    """The scheduler does not let that happen. Were it to, no page of another request would be touched."""
    state = random_state(device)
    plan, _ = random_plan(1, 0, 0, device)
    num_given, widths = torch.ones_like(plan.num_given), torch.full_like(plan.num_given, 7)
    end = state.page_table.shape[1] * PAGE_SIZE
    state.context[plan.slots] = end - 3
    out = fenced_rows(1, 8, 8, 8, device)
    run_layout(state, PlanOnDevice(plan.slots, num_given, plan.emits, plan.teaches), widths, 1, out)
    assert out.positions.tolist() == list(range(end - 3, end + 5))
    assert (out.kv_slots[3:] // PAGE_SIZE).tolist() == 5 * [SCRATCH_PAGE]
    assert (out.kv_slots[:3] // PAGE_SIZE >= 2).all()


@pytest.mark.parametrize(("num_decode", "more"), [(1, 0), (5, 3), (20, 100)])
def test_fill_equals_the_reference(num_decode: int, more: int, device: str) -> None:
    state = random_state(device)
    generator = torch.Generator().manual_seed(2)
    # A fixed buffer, longer than needed.
    drafts = torch.randint(0, 1000, (NUM_SLOTS, 9), generator=generator).to(device)
    widths = torch.randint(0, 8, (num_decode,), generator=generator).to(device)
    given = torch.ones_like(widths)
    plan = PlanOnDevice(torch.arange(num_decode, device=device), given, given > 0, given > 0)
    num_rows = num_decode + int(widths.sum())
    out = fenced_rows(num_decode, num_rows + more, num_rows, num_rows, device)
    run_layout(state, plan, widths, 4, out)
    batch.fill(out.token_ids, out.draft_index, drafts)
    want = reference.layout(state, plan, widths, num_rows, num_rows, PAGE_SIZE)
    assert out.token_ids.tolist() == reference.fill(want, drafts[:num_decode, :7]).tolist() + more * [0]
    assert fence_stands(out.token_ids)


def test_fill_without_rows(device: str) -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    batch.fill(empty, empty, torch.zeros(2, 3, dtype=torch.int64, device=device))


@pytest.mark.parametrize(("num_sequences", "num_rows"), [(1, 1), (1, 17), (7, 8), (33, 8)])
def test_draft_inputs(num_sequences: int, num_rows: int, device: str) -> None:
    state = random_state(device)
    slots = torch.arange(num_sequences, device=device).flip(0)
    slots[-1] = NUM_SLOTS  # padding
    context = state.context[slots]
    ids, anchors, blocks = batch.draft_inputs(slots, state.context, state.token_ids, 999_999, num_rows)
    assert anchors.tolist() == state.token_ids[slots, context].tolist()
    assert ids[:, 0].tolist() == anchors.tolist() and (ids[:, 1:] == 999_999).all()
    assert ids.dtype == anchors.dtype == torch.int64
    places = zip(slots.tolist(), context.tolist(), strict=True)
    assert blocks.tolist() == [[b * num_rows, num_rows, slot, start] for b, (slot, start) in enumerate(places)]


def test_admit_writes_the_new_owner_and_nothing_else(device: str) -> None:
    state = random_state(device)
    before = {name: tensor.clone() for name, tensor in parts(state).items()}
    slots, lengths = [5, -1, 0, 59], [1, 4, MAX_LEN, 70]  # the second is padding
    edits = torch.tensor([0, 3, 1, 0, MAX_EDITS]).cumsum(0)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.arange(int(starts[-1]), dtype=torch.int32) + 2000
    new = {
        "slots": torch.tensor(slots), "cu_tokens": starts, "tokens": tokens,
        "context": torch.tensor([0, 9, 64, 48]), "temperature": torch.tensor([0.0, 9.0, 0.7, 1.5]), "top_k": torch.tensor([0, 9, 5, 40]),
        "top_p": torch.tensor([1.0, 0.9, 0.95, 0.5]), "min_p": torch.tensor([0.0, 0.9, 0.05, 1.0]),
        "seed": torch.tensor([1, 9, -(2**63), 2**63 - 1]), "repetition": torch.tensor([1.0, 9.0, 1.3, 0.5]),
        "frequency": torch.tensor([0.0, 9.0, -2.0, 1.5]), "presence": torch.tensor([0.25, 9.0, 0.0, -1.0]),
        "num_prompt": torch.tensor([1, 9, 77, 70]), "cu_edits": edits, "edit_ids": torch.arange(4 + MAX_EDITS) + 30,
        "edit_values": torch.arange(4.0 + MAX_EDITS).log(), "edit_until": 2**62 - torch.arange(4 + MAX_EDITS),
    }  # fmt: skip
    batch.admit(
        Admissions(**{name: value.to(device) for name, value in new.items()}),
        **{name: getattr(state, name) for name in SlotState.__slots__},
    )
    for i, slot in enumerate(slots):
        if slot < 0:
            continue
        before["token_ids"][slot, : lengths[i]] = tokens[starts[i] : starts[i + 1]].to(device)
        before["context"][slot] = new["context"][i]
        before["page_table"][slot] = NULL_PAGE
        for name in (
            "temperature", "top_k", "top_p", "min_p", "seed", "repetition", "frequency", "presence", "num_prompt"
        ):  # fmt: skip
            before[name][slot] = new[name][i]
        before["num_edits"][slot] = edits[i + 1] - edits[i]
        for name in ("edit_ids", "edit_values", "edit_until"):
            before[name][slot, : edits[i + 1] - edits[i]] = new[name][edits[i] : edits[i + 1]].to(device)
    for name, value in parts(state).items():
        assert torch.equal(value, before[name]), name


def test_write_pages(device: str) -> None:
    state = random_state(device)
    want = state.page_table.clone()
    generator = torch.Generator().manual_seed(0)
    places = torch.randperm(want[:-1].numel(), generator=generator)[:50]
    slot, index = places // want.shape[1], places % want.shape[1]
    slot[::7] = -1  # padding
    writes = torch.stack([slot, index, torch.arange(1000, 1050)], dim=1)
    for s, i, page in writes.tolist():
        if s >= 0:
            want[s, i] = page
    batch.write_pages(state.page_table, writes.to(device))
    assert torch.equal(state.page_table, want)
    batch.write_pages(state.page_table, writes[:0].to(device))
    assert torch.equal(state.page_table, want)


def test_nobody_is_admitted(device: str) -> None:
    state = random_state(device)
    before = {name: tensor.clone() for name, tensor in parts(state).items()}
    none = {
        name: torch.zeros(int(name.startswith("cu_")), dtype=torch.int64, device=device)
        for name in Admissions.__slots__
    }
    batch.admit(Admissions(**none), **{name: getattr(state, name) for name in SlotState.__slots__})
    assert all(torch.equal(value, before[name]) for name, value in parts(state).items())
