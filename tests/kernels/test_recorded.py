"""What is recorded on a plan of nobody serves any step: stages are captured, then called again where a GPU would replay.

A double of `Graphs` keeps the functions that capturing is given. They know nothing of the steps they stand for, so an
answer is right only if all of it lies at fixed addresses. Runs anywhere; what a real graph adds is tested on a GPU.
"""

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.capture import accept_shapes, capture
from slipstream.config import MODES, SamplingParams, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.decide.pace import draft_lengths
from slipstream.device.shapes import Buckets, VerifyShape
from slipstream.engine import Engine
from slipstream.llm import LLM, Completion
from slipstream.testing import tiny_models, tiny_spec
from tests.lossless.harness import PRUNING, on, scripted_cost

# The interpreter is NumPy, which warns of what padding rows do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SLOW = pytest.mark.slow  # interpreted
SPEC = tiny_spec(vocab_size=20)
PROMPTS = [[5, 6, 7, 5], [3, 4], [9, 10, 11, 12, 9]]
PENALTIES = {"presence_penalty": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4}
EDITS = {"min_tokens": 5, "logit_bias": {3: 1.5, 7: -3.0}}


class Recorder:
    """Stands for `Graphs`: a replay is another call."""

    def __init__(self) -> None:
        self.stages: dict[Hashable, Callable[[], Any]] = {}
        self.replays: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self.stages)

    def capture(self, key: Hashable, function: Callable[[], Any]) -> Any:
        assert not gc.isenabled(), "a graph of a former engine might be let go while this one is recorded"
        self.stages[key] = function
        return function()

    def find(self, key: Hashable) -> "Replay | None":
        return Replay(self, key) if key in self.stages else None

    def count(self, stage: str, **fields: object) -> int:
        """Replays of a stage whose shape says so."""
        return sum(
            times for (name, shape), times in self.replays.items()  # type: ignore[misc]
            if name == stage and all(getattr(shape, field) == value for field, value in fields.items())
        )  # fmt: skip


@dataclass
class Replay:
    owner: Recorder
    key: Hashable

    def replay(self) -> Any:
        self.owner.replays[self.key] += 1
        return self.owner.stages[self.key]()


def engine_of(
    mode: str, device: str, backend: str, *, acceptance: str = "coupled", head: str = "vanilla", **options: Any
) -> LLM:
    """Steps with prompts are beyond the largest shape that is captured, unless options say otherwise."""
    models, speculative, policy = tiny_models("dspark", spec=SPEC, markov_head_type=head), SpeculativeConfig(), None
    if mode != "off":
        fields = {"draft_model": "tiny", "num_speculative_tokens": 2, "acceptance": acceptance}
        speculative = SpeculativeConfig.for_mode(mode, **fields)
    if mode in PRUNING:
        policy, _ = make_policy(speculative, num_drafts=2, has_head=True, cost=scripted_cost())
    models = on(device, models) if backend == "triton" else models
    sizes = {"max_model_len": 32, "page_size": 8, "max_num_batched_tokens": 8, "max_num_seqs": 2, **options}
    return LLM(models, speculative=speculative, policy=policy, backend=backend, **sizes)


def recorded(mode: str, device: str, **options: Any) -> tuple[LLM, Recorder]:
    llm, recorder = engine_of(mode, device, "triton", **options), Recorder()
    llm.engine.backend.graphs = recorder  # type: ignore[attr-defined]
    num_drafts = llm.engine.scheduler.limits.max_drafts
    said: list[tuple[int, int]] = []
    lengths = draft_lengths(num_drafts) if mode in PRUNING else (num_drafts,)
    capture(llm.engine, lengths, lambda *progress: said.append(progress))
    assert gc.isenabled()
    assert said[-1] == (len(recorder), len(recorder)), "what was announced is what was recorded"
    return llm, recorder


def params_for(num_top: int | None, **more: object) -> list[SamplingParams]:
    """The first asks for nothing but its log-probabilities."""
    plain = [SamplingParams(temperature=t, seed=i, max_tokens=7) for i, t in enumerate((1.0, 0.0, 1.0))]
    asking = [p if i == 0 else replace(p, **more) for i, p in enumerate(plain)]  # type: ignore[arg-type]
    return [p if i == 1 else replace(p, logprobs=num_top) for i, p in enumerate(asking)]


def same(ours: list[Completion], theirs: list[Completion]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert (a.logprobs is None) == (b.logprobs is None)
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert (x.token_id, x.rank) == (y.token_id, y.rank)
            assert abs(x.logprob - y.logprob) < 1e-4
            assert [token for token, _ in x.top] == [token for token, _ in y.top]


@SLOW
@pytest.mark.parametrize("mode", MODES)
def test_penalties_edits_and_reports_are_replayed(mode: str, device: str) -> None:
    """Requests that ask and others, in one batch after another; then one alone that asks for nothing."""
    llm, recorder = recorded(mode, device)
    silent = SamplingParams(temperature=1.0, seed=7, max_tokens=4)
    plain = engine_of("off", "cpu", "torch")
    for wish, num_top in ((PENALTIES | EDITS, 3), (EDITS, None), ({}, 0)):
        params = params_for(num_top, **wish)
        shaped, reports = recorder.count("accept", shaped=True), recorder.count("report")
        same(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
        assert (recorder.count("accept", shaped=True) > shaped) == bool(wish)
        assert (recorder.count("report") > reports) == (num_top is not None)
    shaped, reports = recorder.count("accept", shaped=True), recorder.count("report")
    same(llm.generate(PROMPTS[:1], silent), plain.generate(PROMPTS[:1], silent))
    assert recorder.count("accept", shaped=False) > 0
    assert (recorder.count("accept", shaped=True), recorder.count("report")) == (shaped, reports)
    if mode != "off":
        totals = llm.engine.totals
        assert 0 < totals.accepted < totals.verified


@SLOW
def test_steps_with_prompts_are_replayed_too(device: str) -> None:
    llm, recorder = recorded("static", device, max_num_batched_tokens=64)
    params = params_for(3, **PENALTIES, **EDITS, prompt_logprobs=2)
    ours, plain = llm.generate(PROMPTS, params), engine_of("off", "cpu", "torch").generate(PROMPTS, params)
    same(ours, plain)
    for a, b in zip(ours[1:], plain[1:], strict=True):
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):  # type: ignore[index]
            assert (x.token_id, x.rank) == (y.token_id, y.rank)  # type: ignore[union-attr]
            assert abs(x.logprob - y.logprob) < 1e-4  # type: ignore[union-attr]
    assert recorder.count("verify", decode_only=False) == recorder.count("accept", decode_only=False) > 1
    assert recorder.count("accept", shaped=True, decode_only=False) > 0
    assert recorder.count("accept", shaped=True, decode_only=True) > 0


FILTERS = {"top_k": 5, "top_p": 0.9, "min_p": 0.05}


@SLOW
@pytest.mark.parametrize("mode", ["off", "lag", "lag-budget"])
def test_filters_are_replayed(mode: str, device: str) -> None:
    """Somebody filters, and somebody does not; then nobody does."""
    llm, recorder = recorded(mode, device)
    plain = engine_of("off", "cpu", "torch")
    for wish in (FILTERS, {"top_p": 0.8}, {}):
        params, filtered = params_for(None, **wish), recorder.count("accept", filtered=True)
        before = recorder.count("accept")
        same(llm.generate(PROMPTS, params), plain.generate(PROMPTS, params))
        assert (recorder.count("accept", filtered=True) > filtered) == bool(wish)
        assert recorder.count("accept") > before
    assert recorder.count("accept", filtered=False) > 0


@SLOW
def test_filters_behind_penalties_are_not_judged_by_a_replay(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read a copy, which a step makes where somebody asks for both; verify is replayed as ever."""
    llm, recorder = recorded("lag", device)
    launched: list[VerifyShape] = []
    stages = Engine.accept_stages

    def spy(self: Engine, shape: VerifyShape, *rest: Any) -> Any:
        launched.append(shape)
        return stages(self, shape, *rest)

    params = [replace(p, **FILTERS) for p in params_for(2, **PENALTIES, **EDITS)]  # type: ignore[arg-type]
    expected = engine_of("off", "cpu", "torch").generate(PROMPTS, params)
    monkeypatch.setattr(Engine, "accept_stages", spy)
    same(llm.generate(PROMPTS, params), expected)
    assert any(shape.filtered and shape.shaped and shape.decode_only for shape in launched)
    assert recorder.count("accept", filtered=True, shaped=True) == 0
    assert recorder.count("verify") > 0
    assert recorder.count("report") > 0


def test_what_acceptance_is_recorded_for() -> None:
    """Never for logits that a grammar changed, nor for both kinds of wishes at once: these are tensors of the step's own."""
    buckets = Buckets(max_num_seqs=2, max_drafts=2, max_rows=64, prunes=True)
    rule: Any = SimpleNamespace(captures=True, captures_wishes=True)
    recorded = {each for shape in buckets.verify_shapes() for each in accept_shapes(rule, shape)}
    for filtered, shaped, struck in itertools.product((False, True), repeat=3):
        shape = buckets.verify(2, 6, 6, decode_only=True, filtered=filtered, shaped=shaped, struck=struck)
        assert (shape in recorded) == (not struck and not (filtered and shaped))


@SLOW
def test_logits_that_are_not_the_targets_own_are_reported_as_they_are(device: str) -> None:
    """A part put around the target may hand on other tensors than those that were recorded."""
    llm, recorder = recorded("static", device)
    verify = llm.engine.target.verify

    def elsewhere(*args: Any) -> Any:
        rows = verify(*args)
        return rows._replace(logits=rows.logits.clone())

    for key in [key for key in recorder.stages if key[0] in ("verify", "accept")]:  # type: ignore[index]
        del recorder.stages[key]
    llm.engine.target.verify = elsewhere  # type: ignore[method-assign]
    params = params_for(3, **PENALTIES)
    same(llm.generate(PROMPTS, params), engine_of("off", "cpu", "torch").generate(PROMPTS, params))
    assert recorder.count("report") == 0


@pytest.mark.parametrize(
    ("mode", "head"),
    [
        *(pytest.param(mode, "vanilla", marks=SLOW) for mode in ("static", *PRUNING)),
        pytest.param("lag", "gated", marks=SLOW),
    ],
)
def test_rejection_is_replayed(device: str, mode: str, head: str) -> None:
    """Drafts and what they were drawn from, and acceptance; penalties come in a launch of their own, over the same law."""
    how: dict[str, Any] = {"acceptance": "rejection", "head": head}
    is_short = mode == "static"
    how |= {"max_num_seqs": 1} if is_short else {}
    llm, recorder = recorded(mode, device, **how)
    plain = engine_of(mode, "cpu", "torch", **how)
    prompts = PROMPTS[:1] if is_short else PROMPTS
    params = [replace(p, max_tokens=10, ignore_eos=True) for p in params_for(None)[: len(prompts)]]
    same(llm.generate(prompts, params), plain.generate(prompts, params))
    assert recorder.count("draft") > 0
    assert recorder.count("accept") == recorder.count("verify") > 0
    assert 0 < llm.engine.totals.accepted < llm.engine.totals.verified
    if mode == "lag":
        replayed, params = recorder.count("accept"), params_for(2, **PENALTIES, **EDITS)
        params[0] = replace(params[0], max_tokens=24, ignore_eos=True)  # it asks for nothing, and ends last, by itself
        same(llm.generate(prompts, params), plain.generate(prompts, params))
        assert recorder.count("accept", shaped=True) == 0
        assert recorder.count("verify") > recorder.count("accept") > replayed
