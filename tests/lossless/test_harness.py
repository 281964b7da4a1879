"""The harness itself: a run in which nothing could have failed proves nothing, and a changed answer is found."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from slipstream.config import SamplingParams
from slipstream.metrics import SpecCounters
from slipstream.testing import TableDrafter, next_token_table, tiny_models, tiny_spec
from tests.lossless import harness
from tests.lossless.harness import PRUNING, Run, judge, run

VOCAB = 20
PROMPTS = [[3 + i, *((7 * i + 3 * j) % 17 + 3 for j in range(i))] for i in range(8)]
PARAMS = [SamplingParams(max_tokens=14, ignore_eos=True)] * len(PROMPTS)
SPECULATING = ("static", *PRUNING)


@cache
def models():
    return tiny_models(spec=tiny_spec(vocab_size=VOCAB))


@cache
def plain():
    return run(models(), "off", PROMPTS, PARAMS)


def sequences():
    return [[*prompt, *answer] for prompt, answer in zip(PROMPTS, plain().answers, strict=True)]


def never_right():
    """For every token one that follows it nowhere."""
    table = []
    for token in range(VOCAB):
        followers = {b for sequence in sequences() for a, b in itertools.pairwise(sequence) if a == token}
        table.append(next(other for other in range(VOCAB) if other not in followers))
    return TableDrafter(table, 8)


def verdict(mode, other, *, first=None):
    return judge(models(), mode, PROMPTS, PARAMS, first or plain(), other)


@pytest.mark.parametrize("mode", SPECULATING)
def test_a_run_that_counts(mode):
    drafter = TableDrafter(next_token_table(sequences(), VOCAB), 8)
    outcome, found = verdict(mode, run(models(), mode, PROMPTS, PARAMS, drafter=drafter))
    assert outcome == "equal", found


@pytest.mark.parametrize("mode", SPECULATING)
def test_fault_15_without_a_drafter(mode):
    outcome, found = verdict(mode, run(models(), "off", PROMPTS, PARAMS))
    assert (outcome, found) == ("inconclusive", "drafted 0, verified 0, accepted 0")


@pytest.mark.parametrize("mode", SPECULATING)
def test_fault_15_with_a_drafter_that_is_never_right(mode):
    other = run(models(), mode, PROMPTS, PARAMS, drafter=never_right())
    assert other.answers == plain().answers
    assert other.totals.verified > 0 == other.totals.accepted
    assert verdict(mode, other)[0] == "inconclusive"


@pytest.mark.parametrize(
    ("mode", "drafted", "verified", "accepted", "outcome"),
    [
        ("static", 70, 70, 70, "inconclusive"),  # nothing was rejected
        ("static", 70, 70, 0, "inconclusive"),
        ("static", 70, 0, 0, "inconclusive"),
        ("static", 70, 70, 30, "equal"),
        ("lag", 70, 70, 30, "inconclusive"),  # nothing was pruned
        ("lag", 70, 40, 30, "equal"),
        ("lag", 70, 40, 40, "inconclusive"),
        ("adaptive", 70, 70, 30, "inconclusive"),
        ("lag-budget", 70, 70, 30, "inconclusive"),
    ],
)
def test_what_counts_is_counted(mode, drafted, verified, accepted, outcome):
    totals = SpecCounters(drafted=drafted, verified=verified, accepted=accepted)
    assert verdict(mode, Run(plain().answers, totals))[0] == outcome


def changed(index, change):
    answers = list(plain().answers)
    answers[index] = change(answers[index])
    return Run(answers, SpecCounters(drafted=70, verified=40, accepted=30))


CHANGES = {
    "first token": lambda a: ((a[0] + 1) % VOCAB, *a[1:]),
    "last token": lambda a: (*a[:-1], (a[-1] + 1) % VOCAB),
    "one token less": lambda a: a[:-1],
    "one token more": lambda a: (*a, 5),
    "nothing": lambda a: (),
    "two swapped": lambda a: (a[1], a[0], *a[2:]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("index", [0, len(PROMPTS) - 1])
def test_a_changed_answer_is_different(name, index):
    outcome, found = verdict("lag", changed(index, CHANGES[name]))
    assert outcome == "different"
    assert f"request {index}," in found


def test_answers_that_are_missing_are_not_overlooked():
    with pytest.raises(ValueError):
        verdict("lag", replace(changed(0, tuple), answers=plain().answers[:-1]))


def test_near_ties_are_excused_once_in_a_hundred(monkeypatch):
    monkeypatch.setattr(harness, "perturbed_gap", lambda *args: 1e-5)
    one = changed(2, CHANGES["last token"])
    assert verdict("lag", one) == ("equal", "drafted 70, verified 40, accepted 30, 1 excused near ties")
    one.answers[3] = CHANGES["last token"](one.answers[3])
    assert verdict("lag", one)[0] == "different"


def test_the_gap_is_that_of_the_token_that_was_chosen():
    """Raising the runner-up by just more than the gap changes the answer's next token, by less it does not."""
    import torch

    target, (prompt, answer) = models().target, (PROMPTS[3], plain().answers[3])
    gap = harness.perturbed_gap(models(), [*prompt, *answer[:4]], PARAMS[0])
    assert gap > harness.GAP
    logits = target.logits

    def raised(by):
        def changed_logits(hidden):
            out = logits(hidden)
            runner_up = out.topk(2, dim=-1).indices[:, 1:]
            return out.scatter_add(1, runner_up, torch.full_like(runner_up, 1, dtype=out.dtype) * by)

        return changed_logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "logits", raised(gap * 0.99))
        same = run(models(), "off", [[*prompt, *answer[:4]]], [replace(PARAMS[0], max_tokens=1)])
        patch.setattr(target, "logits", raised(gap * 1.01))
        other = run(models(), "off", [[*prompt, *answer[:4]]], [replace(PARAMS[0], max_tokens=1)])
    assert same.answers[0][0] == answer[4] != other.answers[0][0]
