"""A dense trace replayed at a fixed width is what mode static does, step by step, with the answers of plain decoding."""

import dataclasses
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.policy import FullWidth
from slipstream.lab.dense import DenseTrace
from slipstream.lab.trace_dense import collect_dense, steps_at, tokens_per_step
from slipstream.llm import LLM, Completion
from slipstream.load import Models, load_models
from slipstream.plan import Decision
from slipstream.prompts import read_prompts, user
from slipstream.testing import assert_nothing_left, tiny_models, tiny_spec

S = 5
ROOM = {"max_model_len": 128, "page_size": 8, "max_num_batched_tokens": 24}
PROMPTS = [tuple((7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 11)) for i in range(7)]


@pytest.fixture(scope="module")
def models() -> Models:
    return tiny_models("dspark", spec=tiny_spec(vocab_size=20))


def params_of(temperature: float, **fields: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=temperature, seed=i, max_tokens=23 + i, **fields) for i in range(len(PROMPTS))]


def collect(
    models: Models, params: list[SamplingParams], concurrency: int = 3, num_drafts: int | None = None, **engine: object
) -> DenseTrace:
    speculative = SpeculativeConfig.for_mode("static", draft_model="tiny", num_speculative_tokens=num_drafts)
    return collect_dense(models, speculative, PROMPTS, params, concurrency=concurrency, **{**ROOM, **engine})


class NoMoreThan(FullWidth):
    """Drafts all and verifies a part."""

    def __init__(self, num_drafts: int, width: int) -> None:
        super().__init__(num_drafts)
        self.width = width

    def decide(self, plan):
        widths = np.minimum(plan.caps_np, np.int32(self.width))
        return Decision(widths_np=widths, budget=None, caps_np=plan.caps_np)


def served(models: Models, params: list[SamplingParams], num_drafts: int, width: int, concurrency: int, overlap: bool):
    """Answers of mode static, and (width, accepted) of each of their steps."""
    speculative = SpeculativeConfig.for_mode("static", draft_model="tiny", num_speculative_tokens=num_drafts)
    policy = None if width == num_drafts else NoMoreThan(num_drafts, width)
    llm = LLM(models, speculative=speculative, policy=policy, max_num_seqs=concurrency, overlap=overlap, **ROOM)
    steps, learn = defaultdict(list), llm.engine.policy.learn

    def note(plan, result):
        for row in range(plan.num_decode):
            steps[int(plan.uids_np[row])].append((int(result.widths_np[row]), int(result.num_accepted_np[row])))
        learn(plan, result)

    llm.engine.policy.learn = note
    answers = llm.generate(PROMPTS, params)
    assert_nothing_left(llm.engine)
    return answers, [_until_the_end(steps[uid + 1], answer) for uid, answer in enumerate(answers)]


def _until_the_end(steps: list[tuple[int, int]], answer: Completion) -> list[tuple[int, int]]:
    """Steps launched before the end was known belong to nobody, and neither does what was accepted behind a stop."""
    *others, (width, accepted) = steps[: answer.spec.steps] or [(0, 0)]
    left = len(answer.token_ids) - 1 - sum(n + 1 for _, n in others)
    return [*others, (width, min(accepted, left))] if left else others


def replayed(trace: DenseTrace, index: int, width: int, most_tokens: int, overlap: bool) -> list[tuple[int, int]]:
    """The same by arithmetic. Where the limit is near, the engine verifies no more than what may still come.

    In the overlapped loop it knows the answer up to the step before: what that accepted may come on top.
    """
    first, length = int(trace.starts_np[index]), int(trace.lengths_np[index])
    steps, anchor, before = [], 0, 0
    while anchor < length - 1:
        cap = min(width, most_tokens - anchor - 2 + (before if overlap else 0))
        accepted = min(cap, int(trace.runs_np[first + anchor]))
        steps.append((cap, accepted))
        anchor, before = anchor + accepted + 1, accepted
    return steps


@pytest.mark.parametrize(
    "overlap", [pytest.param(True, id="overlapped"), pytest.param(False, id="plain", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_fixed_width_replayed_is_mode_static(
    models: Models, temperature: float, concurrency: int, overlap: bool
) -> None:
    """At any width up to S, as long as S drafts are made: a shorter block attends to less and drafts otherwise."""
    params = params_of(temperature)
    accepted = 0
    for num_drafts, width in ((1, 1), (S, S), (S, 2)):
        trace = collect(models, params, num_drafts=num_drafts)
        assert trace.fault() is None and set(trace.signals) == {"head", "peak"}
        answers, steps = served(models, params, num_drafts, width, concurrency, overlap)
        for index, answer in enumerate(answers):
            rows = slice(*trace.starts_np[index : index + 2])
            assert trace.token_ids_np[rows].tolist() == list(answer.token_ids)
            assert trace.prompt_lengths_np[index] == len(PROMPTS[index])
            assert replayed(trace, index, width, params[index].max_tokens, overlap) == steps[index]
            accepted += answer.spec.accepted
        assert steps_at(trace, width).tolist() == [answer.spec.steps for answer in answers]
    assert accepted > (20 if temperature else 3)  # greedy, a random pair seldom agrees


def test_every_anchor_has_its_confidences(models: Models) -> None:
    """All but the last of an answer."""
    trace = collect(models, params_of(0.0, ignore_eos=True))
    is_last = np.isin(np.arange(len(trace.token_ids_np)), trace.starts_np[1:] - 1)
    for name, values in trace.signals.items():
        assert ((values[~is_last] > 0) & (values[~is_last] < 1.001)).all(), name
        assert (values[is_last] == 0).all()
    assert trace.about["tokens_without_drafts"] == 0
    assert trace.lengths_np.tolist() == [23 + i for i in range(len(PROMPTS))]


def test_confidences_are_those_that_the_engine_goes_by(models: Models) -> None:
    """Each signal, at every anchor that mode adaptive stands at."""
    params = params_of(1.0)
    trace = collect(models, params)
    for signal in ("head", "peak"):
        speculative = SpeculativeConfig.for_mode(
            "adaptive", draft_model="tiny", confidence_signal=signal, num_speculative_tokens=8, cost_model="none"
        )
        llm = LLM(models, speculative=speculative, max_num_seqs=3, overlap=False, **ROOM)  # plans know every context
        observe, seen = llm.engine.policy.observe, []

        def note(plan, report, seen=seen, observe=observe):
            seen.append((plan, report.signal_np))
            observe(plan, report)

        llm.engine.policy.observe = note
        llm.generate(PROMPTS, params)
        first = {index + 1: trace.starts_np[index] - len(PROMPTS[index]) for index in range(len(PROMPTS))}
        checked = 0
        for plan, values in seen:
            for row in range(plan.num_decode):
                anchor = int(first[int(plan.uids_np[row])]) + int(plan.context_np[row])
                uid = int(plan.uids_np[row])
                if anchor < trace.starts_np[uid] - 1:
                    np.testing.assert_allclose(values[row], trace.signals[signal][anchor], atol=2e-3)
                    checked += 1
        assert checked > 30


def test_a_preempted_request_and_reused_slots_lose_nothing(models: Models) -> None:
    params = params_of(1.0)
    per_page = 2 * 2 * 8 * 2 * 8 * 4 * 2  # layers, keys and values, page, heads, dimensions, bytes; target and drafter
    short = collect(models, params, kv_memory=9 * per_page)
    whole = collect(models, params, concurrency=1)
    assert short.token_ids_np.tolist() == whole.token_ids_np.tolist()
    # The token that a preempted request had last is computed again with all before it: nobody drafts from it.
    is_hole = (short.signals["peak"] == 0).any(1) & (whole.signals["peak"] > 0).any(1)
    assert 0 < is_hole.sum() == short.about["tokens_without_drafts"] < 5
    assert (short.runs_np[~is_hole] == whole.runs_np[~is_hole]).all() and (short.runs_np[is_hole] == 0).all()
    for name, values in short.signals.items():
        np.testing.assert_allclose(values[~is_hole], whole.signals[name][~is_hole], atol=2e-3)


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_the_command(tiny_folders: tuple[Path, Path], tmp_path: Path, capsys, temperature: str) -> None:
    from slipstream.cli import main

    sets = []
    for name, texts in (("sums", ["1+1", "2+2", "3+3"]), ("words", ["ab", "cd"])):
        sets.append(tmp_path / f"{name}.jsonl")
        sets[-1].write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    out = tmp_path / "runs" / "trace.npz"
    with pytest.raises(SystemExit) as left:
        main([
            "trace", "--model", str(tiny_folders[0]), "--draft", str(tiny_folders[1]), "--prompts", str(sets[0]),
            "--prompts", str(sets[1]), "--requests", "2", "--max-tokens", "9", "--temperature", temperature,
            "--dtype", "float32", "--out", str(out), "--json",
        ])  # fmt: skip
    printed = capsys.readouterr()
    assert left.value.code == 0, printed.err
    report = json.loads(printed.out.splitlines()[-1])
    trace = DenseTrace.load(out)
    assert trace.set_names == ("sums", "words") and trace.sets_np.tolist() == [0, 0, 1, 1]
    assert trace.num_drafts == 5 and (trace.lengths_np <= 9).all()
    assert [row["prompts"] for row in report["rows"]] == ["sums", "words", "all"]
    about = trace.about
    assert about["dtype"] == "float32" and about["num_speculative_tokens"] == 5
    assert about["command"].startswith("slipstream ") and about["draft_digest"] and about["model_digest"]
    assert about["sampling"]["temperature"] == float(temperature)


@pytest.mark.slow
def test_the_shipped_pair_in_fp32(all_threads: None) -> None:
    models = load_models("smollm2-135m", "smollm2-135m-dspark", dtype="float32")
    prompts = [user(text) for text in read_prompts(None, limit=3)]
    params = [SamplingParams(max_tokens=48, seed=i) for i in range(3)]
    for temperature in (0.0, 1.0):
        each = [dataclasses.replace(one, temperature=temperature) for one in params]
        for width in (7, 16):
            speculative = SpeculativeConfig.for_mode(
                "static", draft_model="smollm2-135m-dspark", num_speculative_tokens=width
            )
            trace = collect_dense(models, speculative, prompts, each, concurrency=3)
            answers = LLM(models, speculative=speculative, max_num_seqs=3, max_model_len=512).chat(prompts, each)
            assert trace.token_ids_np.tolist() == [token for answer in answers for token in answer.token_ids]
            assert steps_at(trace, width).tolist() == [answer.spec.steps for answer in answers]
            assert tokens_per_step(trace, width) == pytest.approx(
                sum(a.spec.emitted for a in answers) / sum(a.spec.steps for a in answers)
            )
