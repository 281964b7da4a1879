"""Whatever requests ask for, whatever is drafted and however much of it is verified: answers are plain decoding's.

Hypothesis draws the requests (every field of `SamplingParams` that there is), a drafter that is right nowhere, here and
there or everywhere, widths for every step, and how the engine is sized. Ids, text, log-probabilities, usage and reasons
must equal those of an engine that does not speculate, greedy under both rules and sampled under the coupled one.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.constraint import Constraint
from slipstream.llm import LLM, Completion
from slipstream.logprobs import TokenLogprob
from slipstream.ops.shape_logits import Histories
from slipstream.request import sibling_seed
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import PRUNING, SPECULATING, VOCAB, ScriptedDrafter, asks_for, make_llm, pool_bytes
from tests.e2e.grammars import ANY, allowed_after, grammars
from tests.e2e.test_endings import byte_models
from tests.lossless.harness import GAP, NearTies, scores_after
from tests.lossless.logprobs import NEAR

MAX_LEN = 64
PAGE_SIZE = 8
# Repeatable: what is drawn depends on the test alone, nothing is kept between runs.
PROFILE = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- requests

STOPS = ("b", "ab", "é", "🙂", "\n\n", ". ", "EN", "END", "bb", " a", "zz")
TOKENS = st.integers(0, VOCAB - 1)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "top_p": st.floats(0.1, 1.0),
    "top_k": st.integers(1, VOCAB + 5),
    "min_p": st.floats(0.0, 0.6),
    "repetition_penalty": st.floats(0.5, 3.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "logit_bias": st.dictionaries(TOKENS, st.floats(-8.0, 8.0), min_size=1, max_size=5),
    "min_tokens": st.integers(1, 20),
    "stop_token_ids": st.lists(TOKENS, min_size=1, max_size=3).map(tuple),
    "ignore_eos": st.just(True),
    "stop": st.lists(st.sampled_from(STOPS), min_size=1, max_size=3).map(tuple),
    "include_stop_str_in_output": st.just(True),
    "n": st.integers(2, 3),
    "logprobs": st.integers(0, 4),
    "prompt_logprobs": st.integers(0, 4),
    "structured": st.just(ANY),
}
ALWAYS = {"temperature", "seed", "max_tokens"}


@st.composite
def params(draw: st.DrawFn, sampled: bool) -> SamplingParams:
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), unique=True, max_size=7))
    chosen = {name: draw(FIELDS[name]) for name in names}
    chosen["max_tokens"] = draw(st.integers(1, 24))
    if "structured" in chosen:  # which is refused beside these
        chosen = {name: value for name, value in chosen.items() if name not in ("min_tokens", "ignore_eos")}
    if "min_tokens" in chosen:
        chosen["min_tokens"] = min(chosen["min_tokens"], chosen["max_tokens"])
    heat = draw(st.sampled_from([0.3, 0.7, 1.0, 2.0])) if sampled else 0.0
    return SamplingParams(temperature=heat, seed=draw(st.integers(0, 2**64 - 1)), **chosen)


@dataclass
class Case:
    prompts: list[list[int]]
    params: list[SamplingParams]
    errors: float  # share of positions where the draft is not the token that plain decoding has there
    num_drafts: int
    draws: int  # seed of these positions, and of widths by context and slot
    acceptance: str
    pages: int | None
    engine: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, sampled: bool) -> Case:
    count, rest = draw(st.integers(1, 4)), st.lists(TOKENS, max_size=14)
    return Case(
        prompts=[[3 + i, *draw(rest)] for i in range(count)],
        params=[draw(params(sampled)) for _ in range(count)],
        errors=draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])),
        num_drafts=draw(st.integers(1, 7)),
        draws=draw(st.integers(0, 1000)),
        acceptance="coupled" if sampled else draw(st.sampled_from(["coupled", "rejection"])),
        pages=draw(st.sampled_from([None, MAX_LEN // PAGE_SIZE])),  # few: answers have to give way to each other
        engine={
            "max_num_seqs": draw(st.integers(1, 4)), "max_num_batched_tokens": draw(st.sampled_from([4, 9, 24])),
            "overlap": draw(st.booleans()), "page_size": PAGE_SIZE, "max_model_len": MAX_LEN,
        },
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ answers


def plain_engine() -> LLM:
    llm = make_llm("off", models=byte_models(), max_model_len=MAX_LEN, page_size=PAGE_SIZE)
    llm.grammars = grammars(VOCAB)
    return llm


def engine_for(case: Case, mode: str, known: list[list[int]], backend: str) -> LLM:
    generator = torch.Generator().manual_seed(case.draws)
    wrong = torch.rand(2 * MAX_LEN, generator=generator) < case.errors
    widths = torch.randint(case.num_drafts + 1, (MAX_LEN, 4), generator=generator)
    confidence = asks_for(lambda view: widths[view.context, view.slots])
    drafter = ScriptedDrafter(known, wrong=lambda position: wrong[position], confidence=confidence)
    options = {"num_drafts": case.num_drafts, "acceptance": case.acceptance, "backend": backend, **case.engine}
    if case.pages is not None:
        options["kv_memory"] = pool_bytes(case.pages, plain_engine())
    llm = make_llm(mode, drafter, models=byte_models(), **options)
    llm.grammars = grammars(VOCAB)
    return llm


def said(answer: Completion) -> tuple[object, ...]:
    """All of it but log-probabilities."""
    return (
        answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.usage, answer.index, answer.error,
    )  # fmt: skip


def same_entries(one: Any, two: Any) -> bool:
    """Entries of log-probabilities, which fp32 sums of other numbers of rows may move by 1e-4."""
    if one is None or two is None:
        return one is two
    return len(one) == len(two) and all(map(_same_entry, one, two))


def _same_entry(one: TokenLogprob | None, two: TokenLogprob | None) -> bool:
    if one is None or two is None:
        return one is two
    values = zip([one.logprob, *(x for _, x in one.top)], [two.logprob, *(x for _, x in two.top)], strict=True)
    ids = [token for token, _ in one.top] == [token for token, _ in two.top]
    return (one.token_id, one.rank) == (two.token_id, two.rank) and ids and all(abs(a - b) < NEAR for a, b in values)


def is_near_tie(prompt: list[int], params: SamplingParams, one: Completion, two: Completion) -> bool:
    """Whether the answers part where the two best tokens are within rounding."""
    pairs = zip(one.token_ids, two.token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return False
    before = list(one.token_ids[:first])
    allowed = None if params.structured is None else torch.from_numpy(allowed_after(before, VOCAB))
    if one.index:
        params = dataclasses.replace(params, seed=sibling_seed(params.seed or 0, one.index))
    best = scores_after(byte_models(), [*prompt, *before], params, len(prompt), allowed).topk(2).values
    return float(best[0] - best[1]) < GAP


def check(case: Case, mode: str, totals: Counter[str], near_ties: NearTies, backend: str) -> None:
    plain = plain_engine().generate(case.prompts, case.params)
    first = [answer for answer in plain if answer.index == 0]
    known = [[*prompt, *answer.token_ids] for prompt, answer in zip(case.prompts, first, strict=True)]
    llm = engine_for(case, mode, known, backend)
    answers = llm.generate(case.prompts, case.params)
    assert_nothing_left(llm.engine)
    whose = [i for i, each in enumerate(case.params) for _ in range(each.n)]
    for i, one, two in zip(whose, plain, answers, strict=True):
        if said(one) != said(two):
            assert is_near_tie(case.prompts[i], case.params[i], one, two), (said(one), said(two))
            near_ties.count(0, 1)
        else:
            assert same_entries(one.logprobs, two.logprobs)
            assert same_entries(one.prompt_logprobs, two.prompt_logprobs)
    near_ties.count(len(answers), 0)
    for name in ("drafted", "verified", "accepted"):
        totals[name] += getattr(llm.engine.totals, name)


def run(
    mode: str, drawn: st.SearchStrategy[Case], examples: int, profile: settings = PROFILE, backend: str = "torch"
) -> None:
    """So many of the cases drawn in a mode, of the backend named, against plain decoding in plain torch."""
    totals, near_ties = Counter[str](), NearTies()

    @settings(profile, max_examples=examples)
    @given(case=drawn)
    def prop(case: Case) -> None:
        check(case, mode, totals, near_ties, backend)

    prop()
    assert not near_ties.too_many, near_ties
    assert 0 < totals["accepted"] < totals["verified"], "inconclusive"
    assert mode not in PRUNING or totals["verified"] < totals["drafted"], "inconclusive"


@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_any_requests_are_answered_as_plain_decoding_answers_them(mode: str, sampled: bool) -> None:
    run(mode, cases(sampled), 25)


@pytest.mark.slow
@pytest.mark.parametrize("mode", SPECULATING)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_many_requests_are_answered_as_plain_decoding_answers_them(mode: str, sampled: bool) -> None:
    run(mode, cases(sampled), 300)


def test_every_field_of_a_request_is_drawn() -> None:
    assert {f.name for f in dataclasses.fields(SamplingParams)} == {*FIELDS, *ALWAYS}


# ---------------------------------------------------------------------------------------------------------- faults


def _all_accepted(drafts: Tensor, targets: Tensor, widths: Tensor) -> Tensor:
    return widths.clone()


def _sees_no_drafts(*known: Any) -> Histories:
    return Histories(*known[:-1], torch.zeros_like(known[-1]))


def _first_mask_everywhere(constraint: Constraint, drafts: Any, masks_np: Any) -> None:
    CORRECT_FILL(constraint, [], masks_np)
    masks_np[:] = masks_np[0]


CORRECT_FILL = Constraint.fill
FAULTS = {
    "every draft accepted": ("slipstream.verify.accept.count_accepted_coupled", _all_accepted),
    "penalties that see no drafts": ("slipstream.verify.accept.Histories", _sees_no_drafts),
    "masks that do not follow the drafts": ("slipstream.constraint.Constraint.fill", _first_mask_everywhere),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    with patch(*FAULTS[fault]), pytest.raises(AssertionError, match=r"^(?!inconclusive)"):
        run("static", cases(True), 100, settings(PROFILE, phases=[Phase.generate], report_multiple_bugs=False))
