"""The engine on a CUDA device: the same text as on the CPU, in every mode, and launches that never wait."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.cache.pages import SCRATCH_PAGE
from slipstream.capture import nobody
from slipstream.config import MODES, SamplingParams, SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.device.staging import Exporter
from slipstream.device.state import make_slot_state
from slipstream.draft.ngram import NGramDraft
from slipstream.engine import Engine
from slipstream.kernels import early
from slipstream.llm import LLM
from slipstream.load import load_models
from slipstream.plan import Decision
from slipstream.testing import tiny_models, tiny_spec
from tests.lossless.harness import Run, judge, on, run, scripted_cost

pytestmark = pytest.mark.gpu

SPEC = tiny_spec(vocab_size=20)
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 29)] for i in range(20)]


def serving(algorithm: str) -> dict[str, Any]:
    """Models on the GPU, and the drafter where it is not a network."""
    if algorithm == "ngram":
        return {"models": on("cuda", tiny_models(spec=SPEC)), "drafter": NGramDraft(torch.device("cuda"))}
    return {"models": on("cuda", tiny_models(algorithm, spec=SPEC))}


def params_for(temperature: float) -> list[SamplingParams]:
    top_p = 0.9 if temperature else 1.0
    return [SamplingParams(temperature=temperature, top_p=top_p, seed=i, max_tokens=12) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("algorithm", ["dspark", "dflash", "ngram"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_token_ids_equal_plain_decoding_on_the_cpu(mode: str, algorithm: str, temperature: float) -> None:
    spec, params = SPEC, params_for(temperature)
    plain = run(tiny_models(spec=spec), "off", PROMPTS, params)
    other = run(**serving(algorithm), mode=mode, prompts=PROMPTS, params=params)
    outcome, found = judge(tiny_models(spec=spec), mode, PROMPTS, params, plain, other)
    assert outcome == "equal", found


def looked_up(llm: LLM) -> list[tuple[Any, ...]]:
    """Of every graph that the engine looks for from now on: stage, shape, whether it is there."""
    found: list[tuple[Any, ...]] = []
    graphs = llm.engine.backend.graphs
    find = graphs.find

    def spy(key: Any) -> Any:
        found.append((*key, find(key) is not None))
        return find(key)

    graphs.find = spy
    return found


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    ("algorithm", "acceptance"), [("dspark", "coupled"), ("ngram", "coupled"), ("dspark", "rejection")]
)
@pytest.mark.parametrize("mode", ["static", "lag", "lag-budget"])
@pytest.mark.parametrize("wish", ["plain", "logprobs", "shaped", "all"])
def test_launches_do_not_synchronise(
    mode: str, algorithm: str, acceptance: str, wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("launch_draft", "launch_verify"):
        launch = getattr(Engine, name)

        def guarded(*args: object, launch: object = launch) -> object:
            with no_synchronisation():
                return launch(*args)  # type: ignore[operator]

        monkeypatch.setattr(Engine, name, guarded)
    wishes: dict[str, dict[str, Any]] = {
        "plain": {}, "logprobs": {"logprobs": 3, "prompt_logprobs": 1}, "shaped": {**SHAPING, "top_p": 1.0, "logprobs": 3},
        "all": {**SHAPING, "logprobs": 3, "prompt_logprobs": 1},
    }  # fmt: skip
    params = [replace(p, **wishes[wish]) for p in params_for(1.0)]
    totals = run(**serving(algorithm), mode=mode, prompts=PROMPTS, params=params, acceptance=acceptance).totals
    assert totals.verified > 0 and (totals.accepted > 0 or algorithm == "ngram")  # penalties leave few repetitions


@pytest.mark.parametrize("mode", ["off", "static", "lag", "lag-budget"])
def test_logprobs_beside_replays_equal_those_of_the_stages_they_record(mode: str) -> None:
    """Every other request asks, so that steps with prompts that are reported are mixed with others."""
    captured, eager = engine_of(mode), engine_of(mode)
    eager.engine.backend.graphs = None
    params = [
        replace(p, logprobs=5, prompt_logprobs=2 if i % 4 == 0 else None) if i % 2 == 0 else p
        for i, p in enumerate(params_for(1.0))
    ]
    ours, theirs, silent = (
        llm.generate(PROMPTS, asked)
        for llm, asked in ((captured, params), (eager, params), (captured, params_for(1.0)))
    )
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs] == [c.token_ids for c in silent]
    for mine, other in zip(ours, theirs, strict=True):
        for a, b in ((mine.logprobs, other.logprobs), (mine.prompt_logprobs, other.prompt_logprobs)):
            assert (a is None) == (b is None)
            for x, y in zip(a or (), b or (), strict=True):
                assert (x is None) == (y is None)
                assert x is None or (x.token_id == y.token_id and abs(x.logprob - y.logprob) < 1e-4)


SHAPING: dict[str, Any] = {
    "presence_penalty": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "min_tokens": 5,
    "logit_bias": {3: 1.5, 7: -3.0},
}  # fmt: skip


def shaped_params(temperature: float) -> list[SamplingParams]:
    """No filters; two of three ask for penalties and edits, every other one for log-probabilities."""
    plain = [replace(p, top_p=1.0) for p in params_for(temperature)]
    asking = [replace(p, **SHAPING) if i % 3 else p for i, p in enumerate(plain)]
    return [replace(p, logprobs=5) if i % 2 else p for i, p in enumerate(asking)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_replayed_penalties_and_reports_equal_those_of_plain_torch(mode: str, temperature: float) -> None:
    """And of stages that are launched; steps of those who decode are replayed whole, and so is every report."""
    captured, eager = engine_of(mode), engine_of(mode)
    found = looked_up(captured)
    eager.engine.backend.graphs = None
    params = shaped_params(temperature)
    cpu = LLM(tiny_models(spec=SPEC), max_model_len=128, page_size=8, max_num_batched_tokens=64, max_num_seqs=6)
    ours, theirs, plain = (llm.generate(PROMPTS, params) for llm in (captured, eager, cpu))
    for mine, launched, other in zip(ours, theirs, plain, strict=True):
        assert mine.token_ids == launched.token_ids
        assert (mine.logprobs is None) == (other.logprobs is None)
        for a, b in zip(mine.logprobs or (), launched.logprobs or (), strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert abs(a.logprob - b.logprob) < 1e-6
        if mine.token_ids == other.token_ids:
            for a, c in zip(mine.logprobs or (), other.logprobs or (), strict=True):
                assert abs(a.logprob - c.logprob) < 1e-4
    runs = [Run([c.token_ids for c in each], llm.engine.totals) for each, llm in ((plain, cpu), (ours, captured))]
    if mode == "off":
        assert runs[0].answers == runs[1].answers
    else:
        outcome, why = judge(tiny_models(spec=SPEC), mode, PROMPTS, params, *runs)
        assert outcome == "equal", why
    judged = [(shape, replayed) for stage, shape, replayed in found if stage == "accept" and shape.decode_only]
    reported = [replayed for stage, _, replayed in found if stage == "report"]
    assert any(shape.shaped for shape, _ in judged) and all(replayed for _, replayed in judged)
    assert reported and all(reported)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("mode", ["static", "adaptive", "lag", "lag-budget"])
def test_rejection_replayed_equals_the_stages_it_records(mode: str, head: str) -> None:
    """Draft and acceptance are replays whenever nobody filters; in static, where widths are certain, the CPU says the same."""
    rules = {"acceptance": "rejection", "head": head}
    captured, eager = engine_of(mode, **rules), engine_of(mode, **rules)
    assert captured.engine.rule.captures
    eager.engine.backend.graphs = None
    found = looked_up(captured)
    params = [replace(p, top_p=1.0) for p in params_for(1.0)]
    ours, theirs = (llm.generate(PROMPTS, params) for llm in (captured, eager))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    if mode == "static":
        expected = engine_of(mode, device="cpu", **rules).generate(PROMPTS, params)
        assert [c.token_ids for c in ours] == [c.token_ids for c in expected]
    judged = [replayed for stage, shape, replayed in found if stage == "accept" and shape.decode_only]
    drafted = [replayed for stage, _, replayed in found if stage == "draft"]
    assert judged and drafted and all(judged) and all(drafted)
    assert captured.engine.totals.verified > captured.engine.totals.accepted > 0
    # Who filters, or asks for penalties, is judged beside the graphs, over the same law.
    changed = [replace(p, **(SHAPING if i % 2 else {}), top_p=0.9 if i % 3 else 1.0) for i, p in enumerate(params)]
    ours, theirs = (llm.generate(PROMPTS, changed) for llm in (captured, eager))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]


def test_fault_23_penalties_need_no_copy_of_the_logits() -> None:
    """2,048 rows over 152k tokens: what acceptance makes meanwhile is a few MiB; counts were made with the engine."""
    from slipstream.kernels.accept import accept_coupled
    from slipstream.kernels.shape_logits import Shaper

    state = make_slot_state(256, 64, 16, torch.device("cuda"))
    state.shaping.presence.fill_(1.0)
    shaper = Shaper.make(state.shaping, state.token_ids, 151_936)
    assert shaper.counts.nbytes < 160 << 20
    logits = torch.randn(2048, 151_936, device="cuda", dtype=torch.bfloat16)
    owner, each = torch.arange(2048, device="cuda") // 8, torch.arange(256, device="cuda")
    step = {
        "output_sequence": owner, "output_offset": torch.arange(2048, device="cuda") % 8,
        "cu_outputs": 8 * torch.arange(257, device="cuda"), "widths": 0 * each + 7, "emits": each >= 0,
        "drafts": torch.zeros(256, 7, dtype=torch.int64, device="cuda"), "slots": each, "num_given": 0 * each + 1,
        "context": state.context + 20, "temperature": state.temperature, "seed": state.seed,
        "result": torch.zeros(256, 11, dtype=torch.int32, device="cuda"),
    }  # fmt: skip
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accept_coupled(logits, 151_936, **step, shaper=shaper)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 8 << 20


def test_fault_23_filters_need_no_copy_of_the_logits() -> None:
    """2,048 rows over 152k tokens: of each row a few numbers for each of its tiles and of its 16 bounds."""
    from slipstream.kernels.filters import cut_rows

    logits = torch.randn(2048, 151_936, device="cuda", dtype=torch.bfloat16)
    rows, one = torch.arange(2048, device="cuda"), torch.ones(2048, device="cuda")
    asked = {"temperature": one, "top_k": rows % 99, "top_p": one * 0.9, "min_p": one * 0.01}
    cut_rows(logits[:8], 151_936, output_sequence=rows[:8], slots=rows[:8], **asked)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cut_rows(logits, 151_936, output_sequence=rows, slots=rows, **asked)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 16 << 20


def test_fault_23_reports_need_no_room_to_speak_of() -> None:
    """256 sequences of 16 rows over 152k tokens, 20 top tokens each: tens of MiB beside the logits' own 1.2 GB."""
    from slipstream.kernels.logprobs import report

    logits = torch.randn(256 * 16, 151_936, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(len(logits), device="cuda")
    report(logits[:8], rows[:8], rows[:8], 20)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = report(logits, rows, rows, 20)
    torch.cuda.synchronize()
    assert found.shape == (len(logits), 42)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def engine_of(
    mode: str, *, acceptance: str = "coupled", head: str = "vanilla", device: str = "cuda", **options: Any
) -> LLM:
    """A tiny pair on the GPU with a cost model that makes widths vary."""
    models = on(device, tiny_models("dspark", spec=SPEC, markov_head_type=head))
    speculative, policy = SpeculativeConfig(), None
    if mode != "off":
        speculative = SpeculativeConfig.for_mode(mode, draft_model="tiny", acceptance=acceptance)
        policy, _ = make_policy(speculative, num_drafts=7, has_head=True, cost=scripted_cost())
    sizes = {"max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    return LLM(models, speculative=speculative, policy=policy, **{**sizes, **options})


@pytest.mark.parametrize("mode", ["off", "static", "lag", "lag-budget"])
def test_replays_equal_the_stages_they_record(mode: str) -> None:
    captured, eager = engine_of(mode), engine_of(mode)
    assert captured.engine.backend.captures
    assert len(captured.engine.backend.graphs) > 10
    found = looked_up(captured)
    eager.engine.backend.graphs = None
    wishes: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 1.0}, {"top_k": 9, "min_p": 0.05}]
    params = [replace(p, **wishes[i % 4]) for i, p in enumerate(params_for(1.0))]
    ours, theirs = (llm.generate(PROMPTS, params) for llm in (captured, eager))
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    filtered = [
        replayed for stage, shape, replayed in found if stage == "accept" and shape.filtered and shape.decode_only
    ]
    assert filtered and all(filtered)


def test_look_up_learns_beside_replays() -> None:
    """The n-gram drafter hears what became of its drafts though acceptance is a graph."""
    models, drafter = on("cuda", tiny_models(spec=SPEC)), NGramDraft(torch.device("cuda"))
    run(models, "lag", PROMPTS, params_for(0.0), drafter=drafter)
    assert float(drafter._accepted._counts.sum()) > 0


@pytest.mark.parametrize("mode", ["static", "lag", "lag-budget"])
def test_memory_is_steady_over_a_thousand_steps(mode: str) -> None:
    llm = engine_of(mode)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=90) for _ in PROMPTS]

    def steps(count: int) -> None:
        first = llm.engine.num_decode_steps
        while llm.engine.num_decode_steps - first < count:
            llm.generate(PROMPTS, params)

    steps(300)
    gc.collect()
    torch.cuda.synchronize()
    device, host = torch.cuda.memory_allocated(), resident_bytes()
    steps(1000)
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - device < 1 << 20
    assert resident_bytes() - host < 1 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_padding_touches_nothing_that_lives(acceptance: str) -> None:
    """Three requests padded to four, then a step of nobody: every owned page and slot row keeps its bytes."""
    llm = engine_of("static", acceptance=acceptance, max_num_seqs=4)
    engine = llm.engine
    asked = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    streams = [llm.stream(prompt, asked) for prompt in PROMPTS[5:8]]
    for stream in streams:
        next(stream)
    engine.drain()
    torch.cuda.synchronize()
    before = living(engine)
    drafted = engine.launch_draft(nobody(), False)
    none = np.zeros(0, np.int32)
    engine.backend.place(Decision(widths_np=none, budget=None, caps_np=none))
    shapes = [s for s in engine.backend.buckets.verify_shapes() if engine.backend.graphs.find(("verify", s))]
    kinds: list[tuple[str, dict[str, bool]]] = [("verify", {}), ("accept", {})]
    kinds += [("accept", {"shaped": True}), ("accept", {"filtered": True})] if acceptance == "coupled" else []
    with torch.inference_mode():
        for draft_shape in engine.backend.buckets.draft_shapes((engine.scheduler.limits.max_drafts,)):
            engine.backend.graphs.find(("draft", draft_shape)).replay()
        for shape in shapes:  # the largest, too
            for stage, wishes in kinds:
                engine.backend.graphs.find((stage, replace(shape, **wishes))).replay()
        for size in engine.backend.buckets.report_sizes():
            engine.backend.graphs.find(("report", size)).replay()
    torch.cuda.synchronize()
    assert drafted.draft is None
    assert shapes
    assert all(torch.equal(a, b) for a, b in zip(before, living(engine), strict=True))
    for stream in streams:
        stream.close()


def living(engine: Engine) -> list[torch.Tensor]:
    """Copies of all that belongs to somebody: slot rows, and every page but the scratch page."""
    state, slots = engine.state, engine.state.padding_slot
    parts = [getattr(state, f.name) for f in fields(state) if f.name != "shaping"]
    parts += [getattr(state.shaping, f.name) for f in fields(state.shaping)]
    rows = [part[:slots].clone() for part in parts]
    pages = [t[:, torch.arange(t.shape[1], device=t.device) != SCRATCH_PAGE] for t in pool_tensors(engine)]
    return rows + [t.clone() for t in pages]


def pool_tensors(engine: Engine) -> list[torch.Tensor]:
    pools = [engine.target.pool, engine.drafter.pool]
    return [tensor for pool in pools for tensor in (pool.keys, pool.values)]


@pytest.mark.parametrize("late", ["device", "exports"])
@pytest.mark.parametrize("mode", ["static", "lag", "lag-budget"])
def test_pinned_memory_is_not_used_again_before_it_was_read(
    mode: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device, or the copies to the host, lag behind by a millisecond a step: the text stays."""
    params = params_for(1.0)
    expected = [c.token_ids for c in engine_of(mode).generate(PROMPTS, params)]
    launch, start = Engine.launch_draft, Exporter.start

    def launched_late(self: Engine, *args: Any) -> Any:
        torch.cuda._sleep(2_000_000)
        return launch(self, *args)

    def exported_late(self: Exporter, kind: str, tensor: torch.Tensor) -> Any:
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(2_000_000)
        return start(self, kind, tensor)

    if late == "device":
        monkeypatch.setattr(Engine, "launch_draft", launched_late)
    else:
        monkeypatch.setattr(Exporter, "start", exported_late)
    assert [c.token_ids for c in engine_of(mode).generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("mode", ["off", "static"])
def test_launches_that_overlap_give_the_same_bits(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that read what the one before had not written yet would, in some of a thousand steps, say something else."""
    models = load_models("random:smollm2-135m", "random", dtype="bfloat16", device="cuda")

    def serving_with(is_early: bool) -> LLM:
        monkeypatch.setattr(early, "ENABLED", is_early)  # of the launches that are recorded
        speculative = SpeculativeConfig.for_mode(mode, draft_model="random", num_speculative_tokens=7)
        # Prompts that come again would have fewer rows in a step, and other roundings.
        return LLM(models, speculative=speculative, max_num_seqs=8, max_model_len=512, prefix_caching=False)

    ours, theirs = serving_with(True), serving_with(False)
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    expected = [answer.token_ids for answer in theirs.generate(PROMPTS[:8], params)]
    for _ in range(3):
        assert [answer.token_ids for answer in ours.generate(PROMPTS[:8], params)] == expected
    one = [answer.token_ids for answer in ours.generate(PROMPTS[:1], params)]
    assert one == [answer.token_ids for answer in theirs.generate(PROMPTS[:1], params)]


def test_a_launch_that_follows_a_copied_tap_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one tap all features lie side by side, and a tap is no kernel but a copy of memory."""
    params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True) for _ in PROMPTS]
    found = []
    for is_early in (True, False):
        monkeypatch.setattr(early, "ENABLED", is_early)
        models = on("cuda", tiny_models("dspark", spec=SPEC, target_layer_ids=[0]))
        made = run(models, "static", PROMPTS, params, concurrency=4, num_drafts=5)
        found.append((made.answers, made.totals.accepted))
    assert found[0] == found[1]


@pytest.mark.parametrize(("mode", "acceptance"), [("off", "coupled"), ("static", "coupled"), ("static", "rejection")])
def test_fp16_is_served(mode: str, acceptance: str) -> None:
    """Rows that leave the range would end their requests with an error."""
    models = load_models("random:smollm2-135m", "random", dtype="float16", device="cuda")
    fields = {"draft_model": "random", "num_speculative_tokens": 7, "acceptance": acceptance}
    speculative = SpeculativeConfig.for_mode(mode, **fields)
    llm = LLM(models, speculative=speculative, max_num_seqs=8, max_model_len=512)
    wishes: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 20, "seed": 3},
    ]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **wish) for wish in wishes]
    answers = llm.generate(PROMPTS[: len(params)], params)
    assert [answer.finish_reason for answer in answers] == ["length"] * len(params)
