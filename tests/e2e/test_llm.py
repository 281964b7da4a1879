"""`LLM` as users call it: order, bad input, streams beside each other, seeds, and errors that leave nothing behind."""

from dataclasses import replace

import pytest
import torch

from slipstream import SamplingParams, SpeculativeConfig
from slipstream.errors import CapacityError, CheckpointError, ConfigError, EngineError, RequestError
from slipstream.llm import LLM
from slipstream.testing import assert_nothing_left, tiny_models, tiny_tokenizer
from tests.e2e.engines import (
    PRUNING,
    SPECULATING,
    VOCAB,
    ScriptedDrafter,
    Spy,
    asks_for,
    greedy,
    known,
    make_llm,
    models_with,
    plain_answers,
    pool_bytes,
    prompts_of,
)

PROMPTS = prompts_of(5, 9, 7)
LOOPS = pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
MODES = pytest.mark.parametrize("mode", ["off", *SPECULATING])


def llm_for(mode, params=None, **options):
    params = params or greedy(20)
    scripted = None
    if mode != "off":
        scripted = ScriptedDrafter(known(PROMPTS, params), wrong=lambda position: position % 3 == 0)
    return make_llm(mode, scripted, **options)


def ids(completions):
    return [completion.token_ids for completion in completions]


def joined(chunks):
    return tuple(token for chunk in chunks for token in chunk.token_ids)


# ------------------------------------------------------------------------------------------------------------- generate


@MODES
def test_answers_come_in_the_order_of_the_prompts(mode):
    """Whoever ends first, and whatever waits for a slot."""
    llm = llm_for(mode, max_num_seqs=2)
    params = [greedy(20), greedy(2), greedy(9)]
    answers = llm.generate(PROMPTS, params)
    assert ids(answers) == [plain[: each.max_tokens] for plain, each in zip(plain_20(), params, strict=True)]
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert (answer.prompt_tokens, answer.finish_reason, answer.error) == (len(prompt), "length", None)
        assert answer.text == " ".join(f"t{token}" for token in answer.token_ids)
        assert answer.timing.num_tokens == len(answer.accepted) == len(answer.token_ids)
        assert 0 < answer.timing.ttft_ms <= 1e3 * (answer.timing.last_token_s - answer.timing.submitted_s)
        assert answer.spec.mode == mode
    assert llm.engine.totals.mode == mode
    assert llm.engine.totals.emitted == sum(answer.spec.emitted for answer in answers)
    assert_nothing_left(llm.engine)


def plain_20():
    return plain_answers(PROMPTS, greedy(20))


def test_text_and_its_token_ids_are_the_same_prompt():
    llm = make_llm("off")
    assert llm.generate("t3 t4 t5", greedy())[0].token_ids == llm.generate([[3, 4, 5]], greedy())[0].token_ids
    assert llm.generate(["t3 t4", "t5"], greedy(3))[1].prompt_tokens == 1
    assert llm.generate([], greedy()) == []
    chat = llm.chat([[{"role": "user", "content": "t3 t4 t5"}]], greedy())
    assert chat[0].token_ids == llm.generate([[3, 4, 5]], greedy())[0].token_ids


BAD_PROMPTS = {
    "no text": ("", "empty"),
    "no tokens": ([[]], "empty"),
    "negative": ([[-1]], "-1"),
    "beyond the vocabulary": ([[VOCAB]], f"{VOCAB};.*0 to {VOCAB - 1}"),
    "far beyond": ([[10**6]], "1000000"),
    "not whole": ([[3.5]], "3.5"),
    "not a number": ([["t3"]], "t3"),
    "a boolean": ([[True]], "True"),
    "ids instead of a list of ids": ([3, 4], "prompt"),
    "nothing": ([None], "prompt"),
    "as long as the context": ([[3] * 128], "128 tokens and max_model_len is 128"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_beside_a_running_stream(name):
    """The error names what is wrong; a stream that is open goes on as if nothing had been asked."""
    prompts, message = BAD_PROMPTS[name]
    llm = llm_for("lag")
    stream = llm.stream(PROMPTS[0], greedy(20))
    chunks = [next(stream), next(stream)]
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, greedy())
    if len(prompts) == 1:
        with pytest.raises(RequestError, match=message):
            llm.generate([PROMPTS[1], *prompts], greedy())  # checked before the good one is added
        with pytest.raises(RequestError, match=message):
            llm.stream(prompts[0], greedy())
    assert joined([*chunks, *stream]) == plain_20()[0]
    assert_nothing_left(llm.engine)


def test_bad_parameters_are_refused():
    llm = make_llm("off")
    with pytest.raises(RequestError, match="params: 2 SamplingParams for 3 prompts"):
        llm.generate(PROMPTS, [greedy(), greedy()])
    for fields, name in [
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"), ({"temperature": -1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"),
        ({"top_p": float("nan")}, "top_p"), ({"top_k": -1}, "top_k"), ({"top_k": 2.5}, "top_k"),
        ({"seed": 2**64}, "seed"), ({"seed": "one"}, "seed"), ({"stop_token_ids": (-1,)}, "stop_token_ids"),
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=name):
            SamplingParams(**fields)
    with pytest.raises(ConfigError, match=r"max_num_seq.*did you mean max_num_seqs"):
        LLM(models_with(), max_num_seq=3)


def test_what_loaded_models_cannot_follow_is_refused():
    with pytest.raises(ConfigError, match="dtype is 'bfloat16', but the models were loaded as float32"):
        LLM(models_with(), dtype="bfloat16")
    with pytest.raises(ConfigError, match="device is 'cuda', but the models were loaded on cpu"):
        LLM(models_with(), device="cuda")
    assert LLM(models_with(), dtype="float32", device="cpu").models.dtype == torch.float32


def test_a_backend_that_cannot_run_here_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match="backend is 'triton', which needs a GPU; use backend auto"):
        LLM(models_with(), backend="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'triton', which is not installed: pip install triton"):
        LLM(models_with(), backend="triton")
    notes = {field: (value, reason) for field, value, reason in LLM(models_with()).notes}
    assert notes["backend"] == ("torch", "no GPU")


@pytest.mark.parametrize("options", [{}, {"backend": "torch"}, {"device": "cpu"}, {"device": "cpu", "backend": "auto"}])
def test_deterministic_is_refused_where_nothing_can_be_promised(options):
    with pytest.raises(ConfigError, match=r"deterministic .*backend triton, or dtype float32"):
        LLM(models_with(), deterministic=True, **options)


def test_a_draft_vocabulary_beyond_the_tokenizer_is_refused():
    """Otherwise the first sampled step would index noise that is not there."""
    models = tiny_models("dspark", draft_vocab_size=16)
    models.network.set_draft_vocabulary(torch.tensor([*range(15), 63]))
    models.network.share(models.target)
    speculative = SpeculativeConfig(draft_model="tiny")
    assert LLM(models, speculative=speculative).engine.drafter
    with pytest.raises(CheckpointError, match=r"d2t maps to token id 63.*knows 60 ids"):
        LLM(replace(models, tokenizer=tiny_tokenizer(60)), speculative=speculative)


def test_a_request_larger_than_the_pool_is_refused_and_the_others_go_on():
    llm = make_llm("off", kv_memory=pool_bytes(4, make_llm("off")))
    stream = llm.stream(PROMPTS[0], greedy(20))
    first = next(stream)
    with pytest.raises(CapacityError, match="kv_memory"):
        llm.generate([PROMPTS[1], [3] * 20], greedy(20))
    assert joined([first, *stream]) == plain_20()[0]
    assert_nothing_left(llm.engine)


@MODES
def test_the_longest_prompt_gets_one_token(mode):
    prompt = prompts_of(127)[0]
    scripted = ScriptedDrafter([prompt]) if mode != "off" else None
    (answer,) = make_llm(mode, scripted).generate([prompt], greedy(9))
    assert (len(answer.token_ids), answer.finish_reason) == (1, "length")
    assert answer.token_ids == plain_answers([prompt], greedy(9))[0]


@MODES
@LOOPS
def test_one_slot(mode, overlap):
    llm = llm_for(mode, max_num_seqs=1, overlap=overlap)
    assert ids(llm.generate(PROMPTS, greedy(20))) == plain_20()
    assert_nothing_left(llm.engine)


@MODES
def test_answers_end_with_the_context(mode):
    prompts = prompts_of(20, 24, 22)
    params = greedy(30)
    expected = [answer.token_ids for answer in make_llm("off", max_model_len=32).generate(prompts, params)]
    assert [len(answer) for answer in expected] == [12, 8, 10]
    scripted = ScriptedDrafter(known(prompts, params)) if mode != "off" else None
    answers = make_llm(mode, scripted, max_model_len=32, num_drafts=7).generate(prompts, params)
    assert ids(answers) == expected
    assert {answer.finish_reason for answer in answers} == {"length"}


# ---------------------------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("mode", ["off", "lag"])
def test_seeds(mode):
    hot = greedy(16, temperature=2.0)
    llm = llm_for(mode)
    unseeded = ids(llm.generate([PROMPTS[0]] * 4, hot))
    assert len(set(unseeded)) == 4
    assert ids(llm.generate([PROMPTS[0]] * 4, hot)) != unseeded
    seeded = ids(llm.generate([PROMPTS[0]] * 4, greedy(16, temperature=2.0, seed=5)))
    assert len(set(seeded)) == 1
    assert ids(llm_for(mode).generate([PROMPTS[0]], greedy(16, temperature=2.0, seed=5))) == seeded[:1]
    limits = [greedy(16, temperature=2.0, seed=seed) for seed in (0, -1, 2**64 - 1, -(2**63), 2**63)]
    first, second, third, *_ = found = ids(llm.generate([PROMPTS[0]] * 5, limits))
    assert second == third  # the same 64 bits
    assert len({first, second, *found[3:]}) == 3  # -2**63 and 2**63 are the same too
    assert ids(LLM(models_with(), seed=3).generate([PROMPTS[0]], hot)) == ids(
        LLM(models_with(), seed=3).generate([PROMPTS[0]], hot)
    )


@MODES
def test_sampling_parameters_are_those_of_the_request(mode):
    """What leaves one candidate is greedy decoding, whatever the neighbours and the slot's former tenants asked for."""
    hot = {"temperature": 3.0, "seed": 7}
    params = [
        greedy(20, **hot, top_k=1), greedy(20, **hot), greedy(20, **hot, top_p=1e-6), greedy(20, temperature=1e-4),
        greedy(20), greedy(20, **hot, top_k=VOCAB), greedy(20, **hot, top_p=1.0), greedy(20, **hot, top_k=3),
    ]  # fmt: skip
    llm = llm_for(mode, max_num_seqs=3)
    for order in (params, params[::-1]):
        answers = dict(zip(order, ids(llm.generate([PROMPTS[0]] * len(order), order)), strict=True))
        assert all(answers[params[i]] == plain_20()[0] for i in (0, 2, 3, 4))
        assert answers[params[1]] == answers[params[5]] == answers[params[6]] != plain_20()[0]
        assert answers[params[7]] not in (plain_20()[0], answers[params[1]])


def test_greedy_needs_no_seed():
    llm = make_llm("off")
    assert len(set(ids(llm.generate([PROMPTS[0]] * 3, [greedy(9, seed=seed) for seed in (1, 2, None)])))) == 1


# -------------------------------------------------------------------------------------------------------------- streams


@MODES
@LOOPS
def test_a_stream_is_the_answer_in_pieces(mode, overlap):
    llm = llm_for(mode, overlap=overlap)
    expected = llm.generate([PROMPTS[0]], greedy(20))[0]
    chunks = list(llm.stream(PROMPTS[0], greedy(20)))
    assert joined(chunks) == expected.token_ids
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert tuple(flag for chunk in chunks for flag in chunk.accepted) == expected.accepted
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(len(chunk.token_ids) <= chunk.width + 1 for chunk in chunks)
    assert_nothing_left(llm.engine)


@MODES
@LOOPS
def test_streams_side_by_side_lose_nothing(mode, overlap):
    """Two streams read in turn, a third request generated in between: each gets all of its own tokens."""
    llm = llm_for(mode, overlap=overlap)
    plain = plain_20()
    first, second = llm.stream(PROMPTS[0], greedy(20)), llm.stream(PROMPTS[1], greedy(20))
    got = ([next(first)], [next(second)])
    got[0].append(next(first))
    assert ids(llm.generate([PROMPTS[2]], greedy(20))) == [plain[2]]
    got[1].append(next(second))
    got[0].extend(first)
    got[1].extend(second)
    assert [joined(chunks) for chunks in got] == plain[:2]
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("mode", ["off", "lag"])
@LOOPS
def test_closing_a_stream_frees_everything_and_disturbs_nobody(mode, overlap):
    llm = llm_for(mode, overlap=overlap)
    first, second = llm.stream(PROMPTS[0], greedy(20)), llm.stream(PROMPTS[1], greedy(20))
    chunks = [next(second)]
    next(first)
    chunks.append(next(second))
    first.close()
    assert len(llm.engine.requests) == 1
    chunks.extend(second)
    assert joined(chunks) == plain_20()[1]
    assert_nothing_left(llm.engine)
    third = llm.stream(PROMPTS[2], greedy(20))
    next(third)
    third.close()
    assert_nothing_left(llm.engine)
    llm.stream(PROMPTS[2], greedy(20))  # never read: never started
    assert_nothing_left(llm.engine)


@LOOPS
def test_closing_a_stream_takes_no_confidence_from_others(overlap):
    """Widths follow the last step's confidence, whoever comes and goes."""

    def widths(company):
        script = asks_for(lambda view: (view.context * 7 + 2) % 5)
        scripted = ScriptedDrafter(known(PROMPTS, greedy(20)), confidence=script, wrong=lambda position: position > 0)
        llm = make_llm("lag", scripted, overlap=overlap)
        spy = Spy(llm)
        stream = llm.stream(PROMPTS[0], greedy(20))
        chunks = [next(stream)]
        for _ in range(4):
            chunks.append(next(stream))
            if company:
                other = llm.stream(PROMPTS[1], greedy(20))
                next(other), next(other)
                other.close()
        assert joined([*chunks, *stream]) == plain_20()[0]
        assert_nothing_left(llm.engine)
        return spy.widths_of(1)

    assert widths(company=True) == widths(company=False)


def test_an_error_in_one_request_leaves_the_others_alone():
    llm = llm_for("lag")
    verify = llm.engine.target.verify

    def spoiled(batch, token_ids, segments):
        logits, *rest = verify(batch, token_ids, segments)
        first = llm.engine.state.token_ids[:, 0]
        table = batch.page_table  # the slot of a sequence, by its page table
        slots = (llm.engine.state.page_table[None] == table[:, None]).all(-1).int().argmax(1)
        bad = (first[slots] == PROMPTS[1][0])[batch.output_sequence] & (batch.positions[batch.output_rows] > 12)
        return torch.where(bad[:, None], torch.nan, logits), *rest

    llm.engine.target.verify = spoiled
    plain = plain_20()
    answers = llm.generate(PROMPTS, greedy(20))
    assert [answer.finish_reason for answer in answers] == ["length", "error", "length"]
    assert [answers[0].token_ids, answers[2].token_ids] == [plain[0], plain[2]]
    good, bad = llm.stream(PROMPTS[0], greedy(20)), llm.stream(PROMPTS[1], greedy(20))
    chunks, failed = [next(good)], [next(bad)]
    with pytest.raises(EngineError, match="not finite"):
        failed.extend(bad)
    assert failed[-1].finish_reason == "error"
    assert joined([*chunks, *good]) == plain[0]
    assert_nothing_left(llm.engine)


# ----------------------------------------------------------------------------------------- exceptions of users' objects


class Broken(RuntimeError):
    pass


def breaks_at(call, count):
    """`call`, which raises at its count-th time."""
    times = [0]

    def wrapped(*args, **kwargs):
        times[0] += 1
        if times[0] == count:
            raise Broken("on purpose")
        return call(*args, **kwargs)

    return wrapped


PARTS = [
    *[("drafter", "propose", mode) for mode in SPECULATING],
    *[("policy", name, mode) for name in ("decide", "draft_length", "learn") for mode in ("static", "lag")],
    *[("policy", name, mode) for name in ("observe", "timed") for mode in PRUNING],
    ("target", "verify", "adaptive"), ("target", "verify", "off"),
]  # fmt: skip


@LOOPS
@pytest.mark.parametrize(("part", "name", "mode"), PARTS)
def test_an_exception_of_a_part_reaches_the_caller_and_leaves_nothing(part, name, mode, overlap):
    llm = llm_for(mode, overlap=overlap)
    owner = getattr(llm.engine, part)
    whole = getattr(owner, name)
    for count in (1, 2):
        setattr(owner, name, breaks_at(whole, count))
        with pytest.raises(Broken, match="on purpose"):
            llm.generate(PROMPTS, greedy(8))
        assert_nothing_left(llm.engine)
        setattr(owner, name, whole)
        assert ids(llm.generate(PROMPTS, greedy(8))) == [plain[:8] for plain in plain_20()]
        assert_nothing_left(llm.engine)


@LOOPS
@pytest.mark.parametrize("mode", SPECULATING)
def test_an_exception_ends_the_streams_beside_it(mode, overlap):
    """A step that failed half-way is lost for all that took part: they are told, and the engine serves on."""
    llm = llm_for(mode, overlap=overlap)
    stream = llm.stream(PROMPTS[0], greedy(20))
    next(stream)
    drafter = llm.engine.drafter
    whole = drafter.propose
    drafter.propose = breaks_at(whole, 2)
    with pytest.raises(Broken):
        llm.generate([PROMPTS[1]], greedy(20))
    drafter.propose = whole
    with pytest.raises(EngineError, match="on purpose"):
        list(stream)
    assert_nothing_left(llm.engine)
    assert ids(llm.generate(PROMPTS, greedy(20))) == plain_20()
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("max_model_len", [2, 4, 9])
def test_a_cost_model_is_measured_within_a_short_context(max_model_len):
    """At start, with 7 drafts: steps that would go beyond the context are not timed."""
    speculative = SpeculativeConfig.for_mode("lag", draft_model="tiny", num_speculative_tokens=7)
    llm = LLM(tiny_models("dspark"), speculative=speculative, max_model_len=max_model_len, max_num_seqs=2, page_size=1)
    assert llm.engine.policy.cost is not None
    llm.generate([[3]], SamplingParams(max_tokens=5))
    assert_nothing_left(llm.engine)


@pytest.mark.parametrize("overlap", [True, False])
def test_an_interrupt_leaves_nothing(overlap):
    llm = llm_for("lag", overlap=overlap)
    verify = llm.engine.target.verify

    def interrupted(*args):
        raise KeyboardInterrupt

    stream = llm.stream(PROMPTS[0], greedy(20))
    next(stream)
    llm.engine.target.verify = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    llm.engine.target.verify = verify
    assert_nothing_left(llm.engine)
    assert ids(llm.generate(PROMPTS, greedy(20))) == plain_20()


@pytest.mark.parametrize(("asked", "overlaps"), [(None, False), (True, True), (False, False)])
def test_on_a_cpu_the_host_runs_ahead_only_where_that_is_asked_for(asked: bool | None, overlaps: bool) -> None:
    """Host and device are one there: nothing is hidden, and a request may take part in a step more than it needs."""
    assert LLM(models_with(), max_model_len=64, overlap=asked).engine.overlap is overlaps
