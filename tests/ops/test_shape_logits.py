"""Penalties, biases and bans: rows computed by hand, random rows by the definition, and rows that must not notice."""

import math
import random

import pytest
import torch
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.ops import shape_logits as module
from slipstream.ops.shape_logits import Histories, shape_logits
from tests.lossless.shaping import asked_by, plain_shape

INF = math.inf


def rows_of(known: list[list[int]], drafts: list[list[int]], rows: list[tuple[int, int]]) -> Histories:
    """rows: (history, drafts before the row), histories and sequences being numbered alike."""
    length = max(map(len, known))
    owner, before = (torch.tensor(x) for x in zip(*rows, strict=True))
    return Histories(
        torch.tensor([[*ids, *[0] * (length + 2 - len(ids))] for ids in known], dtype=torch.int32), length, owner,
        torch.tensor([len(ids) for ids in known])[owner], torch.tensor(drafts).view(len(drafts), -1), owner, before,
    )  # fmt: skip


def shape_one(
    logits: list[float], prompt: list[int], output: list[int], drafts: tuple[int, ...] = (), ends: tuple[int, ...] = (),
    **fields: object,
) -> list[list[float]]:  # fmt: skip
    """One sequence, its rows from the one of the anchor to the one of the last draft, all with the same logits."""
    asked = asked_by([SamplingParams(**fields)], [len(prompt)], [ends], torch.float64)  # type: ignore[arg-type]
    rows = rows_of([[*prompt, *output]], [list(drafts)], [(0, j) for j in range(len(drafts) + 1)])
    given = torch.tensor([logits] * (len(drafts) + 1), dtype=torch.float64)
    before = given.clone()
    shaped = shape_logits(given, asked, rows)
    assert torch.equal(given, before), "the target's logits are not written to"
    return shaped.tolist()


# Token 0 is in nothing, 1 in the prompt twice, 2 in prompt and output, 3 in the output twice.
LOGITS, PROMPT, OUTPUT = [2.0, 2.0, -2.0, 0.5, -1.0], [1, 2, 1], [3, 2, 3]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [2.0, 2.0, -2.0, 0.5, -1.0]),
        ({"repetition_penalty": 2.0}, [2.0, 1.0, -4.0, 0.25, -1.0]),
        ({"repetition_penalty": 0.5}, [2.0, 4.0, -1.0, 1.0, -1.0]),
        ({"frequency_penalty": 0.5}, [2.0, 2.0, -2.5, -0.5, -1.0]),
        ({"frequency_penalty": -0.5}, [2.0, 2.0, -1.5, 1.5, -1.0]),
        ({"presence_penalty": 0.5}, [2.0, 2.0, -2.5, 0.0, -1.0]),
        ({"logit_bias": {0: -3.0, 3: 1.0}}, [-1.0, 2.0, -2.0, 1.5, -1.0]),
        ({"min_tokens": 4, "ends": (4, 1)}, [2.0, -INF, -2.0, 0.5, -INF]),
        ({"min_tokens": 3, "ends": (4, 1)}, [2.0, 2.0, -2.0, 0.5, -1.0]),
        ({"min_tokens": 4, "ends": (1,), "logit_bias": {1: 100.0}}, [2.0, -INF, -2.0, 0.5, -1.0]),
        # The order: -2 * 2 - .5 - .25 + 10 and .5 / 2 - 2 * .5 - .25.
        ({"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {2: 10.0}},
         [2.0, 1.0, 5.25, -1.0, -1.0]),
    ],
)  # fmt: skip
def test_a_row_by_hand(fields: dict[str, object], expected: list[float]) -> None:
    assert shape_one(LOGITS, PROMPT, OUTPUT, **fields) == [expected]  # type: ignore[arg-type]


def test_a_row_sees_the_drafts_before_it_and_no_others() -> None:
    """Drafts 0, 4, 0: row j counts the first j of them, and whatever a ban waits for."""
    rows = shape_one(LOGITS, PROMPT, OUTPUT, (0, 4, 0), frequency_penalty=1.0)
    assert [row[0] for row in rows] == [2.0, 1.0, 1.0, 0.0]
    assert [row[4] for row in rows] == [-1.0, -1.0, -2.0, -2.0]
    assert [row[3] for row in rows] == [-1.5] * 4
    rows = shape_one(LOGITS, PROMPT, OUTPUT, (0, 4, 0), presence_penalty=1.0, repetition_penalty=2.0)
    assert [row[0] for row in rows] == [2.0, 0.0, 0.0, 0.0]
    assert [row[4] for row in rows] == [-1.0, -1.0, -3.0, -3.0]
    rows = shape_one(LOGITS, PROMPT, OUTPUT, (0, 4, 0), min_tokens=5, ends=(4,))
    assert [row[4] for row in rows] == [-INF, -INF, -1.0, -1.0]


def test_before_the_first_output_only_the_prompt_counts() -> None:
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0}
    assert shape_one(LOGITS, PROMPT, [], **fields) == [[2.0, 1.0, -4.0, 0.5, -1.0]]  # type: ignore[arg-type]


def test_drafts_may_be_all_of_the_output() -> None:
    rows = shape_one(LOGITS, PROMPT, [], (4, 0), presence_penalty=1.0)
    assert rows == [[2.0, 2.0, -2.0, 0.5, -1.0], [2.0, 2.0, -2.0, 0.5, -2.0], [1.0, 2.0, -2.0, 0.5, -2.0]]


def _random_params(pick: random.Random, vocab: int) -> SamplingParams:
    def some(value: float, off: float) -> float:
        return value if pick.random() < 0.6 else off

    return SamplingParams(
        repetition_penalty=some(pick.choice([0.7, 1.3, 5.0]), 1.0), frequency_penalty=some(pick.uniform(-2, 2), 0.0),
        presence_penalty=some(pick.uniform(-2, 2), 0.0), min_tokens=pick.choice([0, 2, 6]),
        logit_bias={pick.randrange(vocab): pick.uniform(-9, 9) for _ in range(pick.randrange(4))},
    )  # fmt: skip


@pytest.mark.parametrize("at_once", [1, 40, 1 << 23])
@pytest.mark.parametrize("seed", range(5))
def test_random_rows_by_the_definition(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged sequences, neutral ones and padding among them, whatever part of them is done at once."""
    monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", at_once)
    pick, vocab, count, most = random.Random(seed), 9, 7, 4

    def ids(least: int, most: int) -> list[int]:
        return [pick.randrange(vocab) for _ in range(pick.randint(least, most))]

    prompts, outputs = [ids(1, 8) for _ in range(count)], [ids(0, 6) for _ in range(count)]
    params = [SamplingParams() if i == 3 else _random_params(pick, vocab) for i in range(count)]
    ends = [ids(0, 2)[:1] if p.min_tokens else [] for p in params]
    drafts = [ids(most, most) for _ in range(count)]
    rows = [(i, j) for i in range(count) for j in range(pick.randint(0, most) + 1)]
    asked = asked_by(params, [len(p) for p in prompts], ends, torch.float64)
    histories = rows_of([[*p, *o] for p, o in zip(prompts, outputs, strict=True)], drafts, rows)
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    shaped = shape_logits(logits, asked, histories)
    for row, (i, j) in enumerate(rows):
        expected = plain_shape(logits[row].tolist(), prompts[i], [*outputs[i], *drafts[i][:j]], params[i], ends[i])
        torch.testing.assert_close(shaped[row], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
        if i == 3:
            assert torch.equal(shaped[row], logits[row])


def test_what_is_not_asked_for_is_not_done() -> None:
    asked = asked_by([SamplingParams(repetition_penalty=2.0, logit_bias={0: 1.0})], [1], [()], torch.float32)
    rows, logits = rows_of([[1, 2]], [[]], [(0, 0)]), torch.tensor([[1.0, 1.0, 1.0]])

    def shaped(**flags: bool) -> list[float]:
        return shape_logits(logits, asked, rows, **flags)[0].tolist()

    assert shaped() == [2.0, 0.5, 0.5]
    assert shaped(any_penalty=False) == [2.0, 1.0, 1.0]
    assert shaped(any_edit=False) == [1.0, 0.5, 0.5]


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("place", range(5))
def test_fault_14_a_row_that_is_not_finite_stays_so(value: float, place: int) -> None:
    """In a token that is penalised, banned, biased or nothing; the row beside it does not notice."""
    fields = {"repetition_penalty": 2.0, "frequency_penalty": 1.0, "min_tokens": 9, "logit_bias": {4: -100.0}}
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    asked = asked_by([params, params], [2, 2], [(1,), (1,)], torch.float32)
    logits = torch.tensor([LOGITS, LOGITS])
    logits[0, place] = value
    rows = rows_of([[*PROMPT, *OUTPUT]] * 2, [[], []], [(0, 0), (1, 0)])
    shaped = shape_logits(logits, asked, rows)
    assert not shaped[0].amax().isfinite()
    assert torch.equal(shaped[1], shape_logits(logits.flip(0), asked, rows)[0])


def test_low_precision_becomes_fp32() -> None:
    asked = asked_by([SamplingParams(presence_penalty=0.001)], [0], [()], torch.float32)
    rows = rows_of([[1]], [[]], [(0, 0)])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        shaped: Tensor = shape_logits(torch.ones(1, 3, dtype=dtype), asked, rows)
        assert shaped.dtype == torch.float32
        torch.testing.assert_close(shaped, torch.tensor([[1.0, 0.999, 1.0]]))


def test_an_id_of_the_padding_is_left_alone() -> None:
    """Requests with such a bias are refused; on the device it must not reach other memory."""
    asked = asked_by([SamplingParams(logit_bias={7: 5.0})], [1], [()], torch.float32)
    assert shape_logits(torch.zeros(1, 3), asked, rows_of([[1]], [[]], [(0, 0)])).tolist() == [[0.0, 0.0, 0.0]]
