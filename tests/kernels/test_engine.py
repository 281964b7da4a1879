"""The engine of fused kernels against the engine of plain torch: equal token ids, in all modes, padding included.

On a CPU the kernels are interpreted and stages run as they are; on a GPU they are replayed.
"""

import copy
from dataclasses import replace

import pytest
import torch

from slipstream import build
from slipstream.config import MODES, EngineConfig, SamplingParams, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.draft.ngram import NGramDraft
from slipstream.llm import LLM
from slipstream.load import Models
from slipstream.metrics import SpecCounters
from slipstream.rehearse import run_largest_steps
from slipstream.sizes import FEWEST_PAGES, PoolSize
from slipstream.structured import StructuredOutput
from slipstream.testing import TableDrafter, tiny_models, tiny_spec
from tests.e2e.grammars import grammars
from tests.lossless.harness import judge, on, run, scripted_cost
from tests.lossless.logprobs import check_answer, check_prompt

# The interpreter is NumPy, which warns of what padding rows do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SPEC = tiny_spec(vocab_size=20)
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 11)] for i in range(4)]


def params_for(temperature: float, **more: float) -> list[SamplingParams]:
    mixed = [temperature if i % 2 else 0.0 for i in range(len(PROMPTS))]
    return [SamplingParams(temperature=t, seed=i, max_tokens=7, **more) for i, t in enumerate(mixed)]  # type: ignore[arg-type]


def check(device: str, mode: str, params: list[SamplingParams], algorithm: str = "dspark", **engine: object) -> None:
    plain = run(tiny_models(spec=SPEC), "off", PROMPTS, params)
    models = on(device, tiny_models(None if algorithm == "ngram" else algorithm, spec=SPEC))
    drafter = NGramDraft(torch.device(device)) if algorithm == "ngram" else None
    options = {"concurrency": 3, "num_drafts": 3, **engine}
    other = run(models, mode, PROMPTS, params, drafter=drafter, backend="triton", **options)  # type: ignore[arg-type]
    if mode == "off":
        assert other.answers == plain.answers
        return
    outcome, found = judge(tiny_models(spec=SPEC), mode, PROMPTS, params, plain, other)
    assert outcome == "equal", found


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_the_largest_steps_run_on_one_page(device: str, acceptance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a KV pool is sized by: see tests/e2e/test_largest_steps.py."""
    monkeypatch.setattr(build, "size_pool", lambda *args: PoolSize(num_pages=FEWEST_PAGES, num_bytes=0))
    models = on(device, tiny_models("dspark", spec=SPEC))
    speculative = SpeculativeConfig.for_mode(
        "static", draft_model="tiny", num_speculative_tokens=3, acceptance=acceptance
    )
    sizes = {"max_num_seqs": 2, "max_model_len": 32, "max_num_batched_tokens": 8, "backend": "triton"}
    engine, _ = build.build_engine(models, speculative, EngineConfig(**sizes), [])  # type: ignore[arg-type]
    assert [plan.num_given for plan in run_largest_steps(engine)] == [2, 8, 8]


# Interpreted, a test takes 10 to 30 seconds: `make test` keeps the one that goes through most kernels.
SLOW = pytest.mark.slow


@pytest.mark.parametrize("mode", [*(pytest.param(mode, marks=SLOW) for mode in MODES[:-1]), MODES[-1]])
def test_greedy_and_sampled_together(device: str, mode: str) -> None:
    check(device, mode, params_for(1.0))


@SLOW
@pytest.mark.parametrize("algorithm", ["dflash", "ngram"])
def test_other_drafters(device: str, algorithm: str) -> None:
    check(device, "static", params_for(1.0), algorithm)


@SLOW
def test_filters(device: str) -> None:
    check(device, "static", params_for(1.0, top_p=0.8, top_k=9, min_p=0.02))


WISH = {
    "presence_penalty": 0.9,
    "repetition_penalty": 1.3,
    "min_p": 0.05,
    "min_tokens": 5,
    "logit_bias": {3: 1.5, 7: -3.0},
}


@SLOW
@pytest.mark.parametrize("mode", ["static", "lag-budget"])
def test_penalties_and_edits_before_filters(device: str, mode: str) -> None:
    """Two requests ask, two do not; the kernels' own law of the rows is that of plain torch. Without filters, see test_recorded.py."""
    asking = params_for(1.0, **WISH)  # type: ignore[arg-type]
    check(
        device,
        mode,
        [each if i < 2 else plain for i, (each, plain) in enumerate(zip(asking, params_for(1.0), strict=True))],
    )


STRUCTURED = StructuredOutput(grammar="root ::= [a-z]*")  # what the automaton of `grammars` stands for


@pytest.mark.parametrize(
    ("mode", "acceptance", "deterministic"),
    [
        pytest.param("lag-budget", "coupled", False, marks=SLOW),
        pytest.param("static", "coupled", True, marks=SLOW),
        pytest.param("lag", "rejection", False, marks=SLOW),
    ],
)
def test_grammars_strike_rows_beside_the_graphs(device: str, mode: str, acceptance: str, deterministic: bool) -> None:
    """Two requests are constrained, two are not."""
    params = [replace(p, structured=STRUCTURED) if i < 2 else p for i, p in enumerate(params_for(1.0))]
    options = {"num_drafts": 3, "concurrency": 3, "grammars": grammars(20), "acceptance": acceptance}
    reference = run(tiny_models("dspark", spec=SPEC), mode, PROMPTS, params, **options)  # type: ignore[arg-type]
    models = on(device, tiny_models("dspark", spec=SPEC))
    ours = run(models, mode, PROMPTS, params, backend="triton", deterministic=deterministic, **options)  # type: ignore[arg-type]
    assert ours.answers == reference.answers
    assert 0 < ours.totals.accepted < ours.totals.verified
    if acceptance == "coupled":
        assert ours.answers == run(tiny_models(spec=SPEC), "off", PROMPTS, params, grammars=grammars(20)).answers


def rejecting(device: str, mode: str, models: Models, params: list[SamplingParams], **more: object) -> SpecCounters:
    """Kernels emit what plain torch does, draw by draw."""
    options = {"concurrency": 3, "num_drafts": 3, "acceptance": "rejection", **more}
    reference = run(models, mode, PROMPTS, params, **options)  # type: ignore[arg-type]
    ours = run(on(device, copy.deepcopy(models)), mode, PROMPTS, params, backend="triton", **options)  # type: ignore[arg-type]
    assert ours.answers == reference.answers
    assert 0 < ours.totals.accepted < ours.totals.verified
    return ours.totals


REDUCED = torch.arange(1, SPEC.vocab_size, 2)


@SLOW
@pytest.mark.parametrize("mode", ["static", "lag-budget"])
def test_rejection_draws_and_judges_by_kernels(device: str, mode: str) -> None:
    rejecting(device, mode, tiny_models("dspark", spec=SPEC), params_for(1.0))


@SLOW
@pytest.mark.parametrize(
    ("drafter", "draft_sampling"),
    [("dflash", "sample"), ("gated", "sample"), ("rnn", "sample"), ("reduced", "sample"), ("dflash", "greedy")],
)
def test_rejection_of_other_networks(device: str, drafter: str, draft_sampling: str) -> None:
    """Heads that are more than a table draw by torch, and leave what they drew from in the same place."""
    fields: dict[str, object] = {"reduced": {"draft_vocab_size": len(REDUCED)}, "dflash": {}}.get(
        drafter, {"markov_head_type": drafter}
    )
    models = tiny_models("dflash" if drafter == "dflash" else "dspark", spec=SPEC, **fields)
    if drafter == "reduced":
        assert models.network is not None
        models.network.set_draft_vocabulary(REDUCED)
        models.network.share(models.target)
    rejecting(device, "static", models, params_for(1.0), draft_sampling=draft_sampling)


@SLOW
@pytest.mark.skipif(torch.cuda.is_available(), reason="its table is on the CPU")
def test_rejection_of_a_drafter_that_brings_its_law(device: str) -> None:
    rejecting(device, "static", tiny_models(spec=SPEC), params_for(1.0), drafter=TableDrafter([*range(1, 20), 3], 3))


@SLOW
def test_rejection_under_penalties_and_edits(device: str) -> None:
    rejecting(device, "static", tiny_models("dspark", spec=SPEC), params_for(1.0, **WISH))  # type: ignore[arg-type]


def entries_are_those_of_a_dense_forward(device: str, mode: str, acceptance: str, asked: list[SamplingParams]) -> None:
    """Replayed where there are graphs, but for the head over rows of prompts."""
    models, speculative, policy = on(device, tiny_models("dspark", spec=SPEC)), SpeculativeConfig(), None
    if mode != "off":
        fields = {"draft_model": "tiny", "num_speculative_tokens": 3, "acceptance": acceptance}
        speculative = SpeculativeConfig.for_mode(mode, **fields)
        policy, _ = make_policy(speculative, num_drafts=3, has_head=True, cost=scripted_cost())
    sizes = {"max_model_len": 64, "page_size": 8, "max_num_batched_tokens": 8, "max_num_seqs": 3}
    llm = LLM(models, speculative=speculative, policy=policy, backend="triton", **sizes)
    dense = tiny_models(spec=SPEC)
    for prompt, params, answer in zip(PROMPTS, asked, llm.generate(PROMPTS, asked), strict=True):
        check_answer(dense, prompt, answer, params.logprobs)
        check_prompt(dense, prompt, answer, params.prompt_logprobs)
    if mode != "off":
        assert llm.engine.totals.verified > llm.engine.totals.accepted > 0


def asking(params: list[SamplingParams]) -> list[SamplingParams]:
    """Each for something else, one for nothing; short answers."""
    wishes = [(2, 1), (None, 3), (None, None), (20, None)]
    return [replace(p, logprobs=a, prompt_logprobs=b, max_tokens=5) for p, (a, b) in zip(params, wishes, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_a_dense_forward(device: str, mode: str, acceptance: str) -> None:
    """Seeds with which rejection accepts something, too: between such networks few drafts stand."""
    params = [replace(each, seed=10 + i) for i, each in enumerate(params_for(1.0))]
    entries_are_those_of_a_dense_forward(device, mode, acceptance, asking(params))


@SLOW
@pytest.mark.parametrize("mode", ["static", "lag-budget"])
def test_logprobs_come_before_penalties_and_edits(device: str, mode: str) -> None:
    entries_are_those_of_a_dense_forward(device, mode, "coupled", asking(params_for(1.0, **WISH)))  # type: ignore[arg-type]


@SLOW
def test_prefixes_are_found_in_the_cache(device: str) -> None:
    """Two requests over two pages that one before them has computed."""
    first, params = [*range(3, 20)], SamplingParams(max_tokens=6, ignore_eos=True)
    prompts = [[*first, 4 + i] for i in range(2)]
    plain = LLM(tiny_models(spec=SPEC), max_model_len=64, page_size=8).generate([first, *prompts], params)
    speculative = SpeculativeConfig.for_mode("static", draft_model="tiny", num_speculative_tokens=3)
    sizes = {"max_model_len": 64, "page_size": 8, "max_num_batched_tokens": 24, "max_num_seqs": 2}
    llm = LLM(on(device, tiny_models("dspark", spec=SPEC)), speculative=speculative, backend="triton", **sizes)
    answers = [*llm.generate([first], params), *llm.generate(prompts, params)]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
    assert llm.engine.scheduler.prefixes.num_hits == 2 * 16
