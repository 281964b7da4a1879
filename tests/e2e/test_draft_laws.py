"""What is kept of the distributions that drafts were drawn from: logits in the engine's dtype, nothing as wide as fp32."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.config import SpeculativeConfig
from slipstream.draft.base import Draft
from slipstream.llm import LLM
from slipstream.ops.noise import CounterSource
from slipstream.ops.reject import DraftLaw, draft_sample
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec
from slipstream.verify.accept import SamplingView
from tests.e2e.engines import greedy, prompts_of

VOCAB, DRAFTS, SLOTS = 512, 4, 6
PROMPTS = prompts_of(5, 9, 3, 7, 4, 6)
PARAMS = [greedy(10, temperature=(0.0, 1.0, 0.7)[i % 3], seed=i) for i in range(SLOTS)]


def engine(acceptance: str, dtype: torch.dtype, reduced: int | None = None, signal: str = "auto") -> LLM:
    models = tiny_models(
        "dspark", spec=tiny_spec(vocab_size=VOCAB), **({"draft_vocab_size": reduced} if reduced else {})
    )
    models.target.to(dtype), models.network.to(dtype).share(models.target.to(dtype))
    speculative = SpeculativeConfig.for_mode(
        "lag", draft_model="tiny", num_speculative_tokens=DRAFTS, acceptance=acceptance, cost_model="none",
        confidence_signal=signal,
    )  # fmt: skip
    return LLM(models, speculative=speculative, max_model_len=64, max_num_seqs=SLOTS, page_size=8)


class Widest(TorchDispatchMode):
    """Bytes of the largest tensor in fp32 or float64 that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64):
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return found


def drafts_of(llm: LLM) -> tuple[list[Draft], int]:
    """Those of a run, and the bytes of the largest tensor in fp32 or more that was made while they were drafted."""
    drafter, drafts, widest = llm.engine.drafter, [], Widest()
    propose = drafter.propose

    def watched(*given: Any) -> Draft:
        with widest:
            drafts.append(propose(*given))
        return drafts[-1]

    drafter.propose = watched
    answers = llm.generate(PROMPTS, PARAMS)
    assert all(len(answer.token_ids) == 10 for answer in answers)
    assert_nothing_left(llm.engine)
    return drafts, widest.nbytes


def bytes_of(law: DraftLaw) -> int:
    return sum(value.nbytes for f in fields(law) if isinstance(value := getattr(law, f.name), Tensor))


@pytest.mark.parametrize("reduced", [None, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_law_takes_the_bytes_of_its_logits(dtype: torch.dtype, reduced: int | None) -> None:
    """[D, d, Vd] in the engine's dtype, two numbers a draft, some a sequence; a reduced vocabulary stays reduced."""
    drafts, _ = drafts_of(engine("rejection", dtype, reduced))
    width = reduced or VOCAB
    for draft in drafts:
        count, num_drafts = draft.token_ids.shape
        small = count * num_drafts * 2 * 4 + count * 5 + (8 * reduced if reduced else 0)
        assert bytes_of(draft.law) == count * num_drafts * width * dtype.itemsize + small


@pytest.mark.parametrize("signal", ["head", "peak", "drawn"])
def test_nothing_in_fp32_is_made_for_all_drafts(signal: str) -> None:
    """One draft of each sequence at a time is: its probabilities, and their sums in float64."""
    drafts, wide = drafts_of(engine("rejection", torch.bfloat16, signal=signal))
    count = max(len(draft.token_ids) for draft in drafts)
    assert count == SLOTS
    assert wide <= SLOTS * VOCAB * 8 < SLOTS * DRAFTS * VOCAB * 4


def test_coupled_acceptance_keeps_nothing() -> None:
    drafts, _ = drafts_of(engine("coupled", torch.bfloat16))
    assert drafts and all(draft.law is None for draft in drafts)


def test_no_law_outlives_its_step() -> None:
    llm = engine("rejection", torch.bfloat16)
    launch, flights = llm.engine.launch_verify, []

    def kept(*given: Any) -> Any:
        flights.append(launch(*given))
        return flights[-1]

    llm.engine.launch_verify = kept
    llm.generate(PROMPTS, PARAMS)
    assert flights and all(flight.drafted.draft is None for flight in flights)


def test_in_bf16_drafts_are_drawn_from_the_law_that_scores_them() -> None:
    """Drawn again from what was kept, every draft is the same, Markov bias and all."""
    llm, views = engine("rejection", torch.bfloat16), []
    drafter, propose = llm.engine.drafter, llm.engine.drafter.propose
    again = 0

    def checked(view: Any, num_drafts: int, sampler: Any, signal: str) -> Draft:
        nonlocal again
        draft, step = propose(view, num_drafts, sampler, signal), sampler.view
        assert isinstance(step, SamplingView)
        count, source = step.num_decode, CounterSource()
        for j in range(num_drafts):
            given = draft.law.logits[:, j], step.temperature[:count], step.seed[:count], step.first_position[:count] - 1
            drawn, law = draft_sample(*given, j, source)
            assert torch.equal(drawn, draft.token_ids[:, j])
            assert torch.equal(law.of(drawn[:, None]), draft.law.of(draft.token_ids)[:, j : j + 1])
            again += int((step.temperature[:count] > 0).sum())
        views.append(view)
        return draft

    drafter.propose = checked
    llm.generate(PROMPTS, PARAMS)
    assert again > 50


@pytest.mark.parametrize("signal", ["peak", "drawn"])
def test_confidence_is_read_from_the_law(signal: str) -> None:
    """The same as that of dense probabilities, at the temperature of the request, at 1 where it is greedy."""
    llm = engine("rejection", torch.float32, signal=signal)
    drafts, _ = drafts_of(llm)
    for draft in drafts:
        law = draft.law
        dense = (law.logits / law.divisor[:, None, None]).softmax(-1)
        expected = dense.amax(-1) if signal == "peak" else dense.gather(2, draft.token_ids[..., None])[..., 0]
        torch.testing.assert_close(draft.signal, expected)
