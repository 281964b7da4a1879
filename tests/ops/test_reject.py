"""Acceptance, draft by draft: what is looked at, what follows, and the laws that come out with real random numbers.

Exactness itself is proved by enumeration in `tests/lossless`; the statistics here check that the real source fits in.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.ops.noise import CounterSource, Purpose, gumbel
from slipstream.ops.reject import DraftLaw, count_accepted_coupled, draft_sample, reject
from slipstream.ops.sample import coupled_targets, probabilities
from tests.lossless.laws import dense, law_from

SOURCE = CounterSource()
NUM_SEEDS = 20_000
P = (0.4, 0.3, 0.2, 0.1)
Q = (0.5, 0.3, 0.1, 0.1)


def _chi_square_passes(counts: Tensor, prob: Tensor) -> bool:
    """counts [V] of draws from prob [V]; fails by chance about once in 10^6."""
    expected = prob.double() * counts.sum()
    assert counts[prob == 0].sum() == 0
    support = expected > 0
    statistic = ((counts - expected)[support] ** 2 / expected[support]).sum()
    freedom = int(support.sum()) - 1
    return bool(statistic < freedom + 7 * math.sqrt(2 * freedom) + 12)


# ------------------------------------------------------------------------------------------------------------- coupled


def test_coupled_counts_the_leading_matches_within_the_width() -> None:
    targets = torch.tensor([[5, 6, 7, 8]]).repeat(7, 1)
    drafts = torch.tensor([[5, 6, 7]] * 4 + [[5, 0, 7], [0, 6, 7], [5, 6, 0]])
    widths = torch.tensor([0, 1, 2, 3, 3, 3, 3])
    assert count_accepted_coupled(drafts, targets, widths).tolist() == [0, 1, 2, 3, 1, 0, 2]
    assert count_accepted_coupled(drafts[:, :0], targets[:, :1], torch.zeros(7, dtype=torch.int64)).tolist() == [0] * 7


def _markov(vocab: int, spread: float, seed: int) -> Tensor:
    return spread * torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))


def _plain(logits: Tensor, temperature: Tensor, seeds: Tensor, length: int) -> Tensor:
    """[N, length + 1] the plain decoder: position 0 holds token 0."""
    tokens = [torch.zeros_like(seeds)]
    for position in range(1, length + 1):
        noise = gumbel(seeds, torch.full_like(seeds, position), len(logits))
        tokens.append(coupled_targets(logits[tokens[-1]], temperature, noise))
    return torch.stack(tokens, dim=1)


@pytest.mark.parametrize("drafting", ["coupled", "argmax", "random"])
def test_coupled_emits_the_plain_decoders_tokens_for_any_drafts_and_widths(drafting: str) -> None:
    vocab, num_drafts, length, size = 8, 4, 40, 60
    generator = torch.Generator().manual_seed(5)
    target, drafter = _markov(vocab, 2.0, 0), _markov(vocab, 2.0, 0) + _markov(vocab, 0.7, 1)
    seeds = torch.arange(size) - 7
    temperature = torch.where(torch.arange(size) % 3 == 0, 0.0, 1.0)
    expected = _plain(target, temperature, seeds, length + num_drafts)
    emitted = torch.zeros_like(expected)
    context = torch.zeros(size, dtype=torch.int64)  # position of the anchor
    rows, total = torch.arange(size), 0
    while int(context.min()) < length:
        noise = torch.stack([gumbel(seeds, context + j + 1, vocab) for j in range(num_drafts + 1)], dim=1)
        block = [emitted[rows, context]]
        for j in range(num_drafts):
            step_noise = noise[:, j] if drafting == "coupled" else None
            guess = torch.randint(0, vocab, (size,), generator=generator)
            block.append(
                guess if drafting == "random" else coupled_targets(drafter[block[-1]], temperature, step_noise)
            )
        inputs = torch.stack(block, dim=1)
        logits = target[inputs].view(-1, vocab)
        targets = coupled_targets(logits, temperature.repeat_interleave(num_drafts + 1), noise.view(-1, vocab))
        targets = targets.view(size, num_drafts + 1)
        widths = torch.randint(0, num_drafts + 1, (size,), generator=generator)
        accepted = count_accepted_coupled(inputs[:, 1:], targets, widths)
        total += int(accepted.sum())
        running = context < length
        for j in range(num_drafts + 1):
            write = running & (j <= accepted)
            at = (context + 1 + j).clamp(max=expected.shape[1] - 1)
            emitted[rows, at] = torch.where(write, targets[:, j], emitted[rows, at])
        context = torch.where(running, context + accepted + 1, context)
    assert total > 0
    assert torch.equal(emitted[:, : length + 1], expected[:, : length + 1])


def test_coupled_tokens_follow_the_target_law_at_every_position() -> None:
    target, temperature = _markov(8, 1.0, 2), torch.ones(NUM_SEEDS)
    tokens = _plain(target, temperature, torch.arange(NUM_SEEDS), 3)
    for position in (1, 2, 3):
        for last in tokens[:, position - 1].unique().tolist():
            following = tokens[tokens[:, position - 1] == last, position]
            counts = torch.bincount(following, minlength=8).double()
            assert _chi_square_passes(counts, target[last].double().softmax(0)), (position, last)


def test_coupled_drafts_agree_as_often_as_promised() -> None:
    """At least (1 - TV) / (1 + TV) of the time, and more often than independent draws would."""
    seeds = torch.arange(NUM_SEEDS)
    noise, heat = gumbel(seeds, 0 * seeds, 4), torch.ones(NUM_SEEDS)
    target, drafter = torch.tensor(P), torch.tensor(Q)
    agree = coupled_targets(target.log().expand(NUM_SEEDS, -1), heat, noise) == coupled_targets(
        drafter.log().expand(NUM_SEEDS, -1), heat, noise
    )
    distance = float((target - drafter).abs().sum()) / 2
    rate, error = float(agree.double().mean()), 4 / math.sqrt(NUM_SEEDS) / 2
    assert (1 - distance) / (1 + distance) - error <= rate <= 1 - distance + error
    assert rate > float((target * drafter).sum()) + error


# ----------------------------------------------------------------------------------------------------------- rejection


def _repeat(*prob: tuple[float, ...], size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[size, len(prob), V]"""
    return torch.tensor(prob, dtype=dtype).expand(size, -1, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draft_that_is_always_the_same_token_has_a_one_hot_law(dtype: torch.dtype) -> None:
    """Verified against the dense q it would emit (.8, 0, .2, 0)."""
    seeds = torch.arange(NUM_SEEDS)
    drafts = torch.zeros(NUM_SEEDS, 1, dtype=torch.int64)
    target = _repeat(P, P, size=NUM_SEEDS, dtype=dtype)
    widths = torch.ones_like(seeds)

    def first_tokens(draft_probs: Tensor) -> Tensor:
        accepted, following = reject(drafts, law_from(draft_probs), target, widths, seeds, 0 * seeds, SOURCE)
        first = torch.where(accepted > 0, drafts[:, 0], following)
        return torch.bincount(first, minlength=4).double()

    assert _chi_square_passes(first_tokens(_repeat((1, 0, 0, 0), size=NUM_SEEDS, dtype=dtype)), torch.tensor(P))
    faulty = first_tokens(_repeat(Q, size=NUM_SEEDS, dtype=dtype)) / NUM_SEEDS
    torch.testing.assert_close(faulty, torch.tensor([0.8, 0, 0.2, 0]).double(), rtol=0, atol=0.02)


def test_rejection_follows_the_target_law_after_every_prefix_and_in_the_next_step() -> None:
    """V = 8, S = 2, two steps with real noise; the second step's width depends on what the first one drafted."""
    vocab, seeds = 8, torch.arange(NUM_SEEDS)
    target, drafter = _markov(vocab, 1.0, 3), _markov(vocab, 1.0, 3) + _markov(vocab, 0.8, 4)
    law, heat = target.softmax(-1), torch.ones(NUM_SEEDS)
    last, context, widths = 0 * seeds, 0 * seeds, 0 * seeds + 2
    for step in range(2):
        block, laws = [last], []
        for j in range(2):
            drawn, law_of_draft = draft_sample(drafter[block[-1]], heat, seeds, context, j, SOURCE)
            block.append(drawn)
            laws.append(law_of_draft)
        inputs, kept = torch.stack(block, dim=1), DraftLaw.join(laws)
        accepted, following = reject(inputs[:, 1:], kept, law[inputs], widths, seeds, context, SOURCE)
        tokens = torch.cat([inputs, following[:, None]], dim=1)
        tokens = tokens.scatter(1, accepted[:, None] + 1, following[:, None])  # anchor, then what was emitted
        for j in range(3):  # token j + 1 exists where at least j drafts stand; that is known before it is drawn
            alive = accepted >= j
            for before in range(vocab):
                chosen = tokens[alive & (tokens[:, j] == before), j + 1]
                if len(chosen) > 200:
                    assert _chi_square_passes(torch.bincount(chosen, minlength=vocab).double(), law[before]), (step, j)
        assert 0 < int(accepted.sum()) < int(widths.sum())
        widths = (kept.of(inputs[:, 1:])[:, 1] > 0.3).long() * 2
        last, context = following, context + accepted + 1


def test_acceptance_reaches_one_minus_the_distance() -> None:
    seeds = torch.arange(NUM_SEEDS)
    logits = torch.tensor(Q).log().expand(NUM_SEEDS, -1)
    drawn, law = draft_sample(logits, torch.ones(NUM_SEEDS), seeds, 0 * seeds, 0, SOURCE)
    accepted, _ = reject(
        drawn[:, None], law, _repeat(P, P, size=NUM_SEEDS), torch.ones_like(seeds), seeds, 0 * seeds, SOURCE
    )
    assert abs(float(accepted.double().mean()) - 0.9) < 4 * 0.3 / math.sqrt(NUM_SEEDS)


def _random_case(size: int, num_drafts: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    draft_probs = torch.rand(size, num_drafts, vocab, generator=generator).softmax(-1)
    target = torch.rand(size, num_drafts + 1, vocab, generator=generator).mul(2).softmax(-1)
    drafts = torch.randint(0, vocab, (size, num_drafts), generator=generator)
    return drafts, draft_probs, target, torch.randint(0, num_drafts + 1, (size,), generator=generator)


def test_nothing_beyond_the_width_is_looked_at_and_rows_do_not_meet() -> None:
    drafts, draft_probs, target, widths = _random_case(64, 5, 7)
    seeds = torch.arange(64) * 3
    accepted, following = reject(drafts, law_from(draft_probs), target, widths, seeds, seeds, SOURCE)
    assert bool((accepted <= widths).all())
    assert 0 < int((accepted < widths).sum()) < 64
    beyond = torch.arange(5) >= widths[:, None]
    hidden_law = law_from(draft_probs.masked_fill(beyond[..., None], torch.nan))
    hidden = drafts.masked_fill(beyond, 6), hidden_law, target.clone()
    hidden[2][:, 1:].masked_fill_(beyond[..., None], torch.nan)
    again = reject(*hidden, widths, seeds, seeds, SOURCE)
    assert torch.equal(again[0], accepted)
    assert torch.equal(again[1], following)
    for row in range(0, 64, 9):
        one = slice(row, row + 1)
        alone = reject(
            drafts[one], law_from(draft_probs[one]), target[one], widths[one], seeds[one], seeds[one], SOURCE
        )
        assert (int(alone[0]), int(alone[1])) == (int(accepted[row]), int(following[row]))


def test_width_zero_and_no_drafts_sample_the_first_row() -> None:
    drafts, draft_probs, target, _ = _random_case(32, 3, 5)
    seeds, zeros = torch.arange(32), torch.zeros(32, dtype=torch.int64)
    expected = SOURCE.categorical(target[:, 0], seeds, seeds, zeros, Purpose.RESIDUAL)
    for count in (3, 0):
        accepted, following = reject(
            drafts[:, :count], law_from(draft_probs[:, :count]), target, zeros, seeds, seeds, SOURCE
        )
        assert accepted.tolist() == [0] * 32
        assert torch.equal(following, expected)


def test_greedy_requests_are_decided_without_chance() -> None:
    """One-hot targets: the drafts that equal the argmax stand, then comes the argmax; whatever q was."""
    drafts, draft_probs, target, widths = _random_case(64, 4, 6)
    best = target.argmax(-1)
    drafts = torch.where(torch.rand(64, 4, generator=torch.Generator().manual_seed(7)) < 0.7, best[:, :4], drafts)
    heat = torch.zeros(64 * 5)
    greedy = probabilities(target.log().view(-1, 6), heat).view(64, 5, 6)
    expected = count_accepted_coupled(drafts, best, widths)
    for kept in (
        law_from(draft_probs),
        None,
        law_from(torch.zeros_like(draft_probs).scatter_(2, drafts[..., None], 1)),
    ):
        accepted, following = reject(drafts, kept, greedy, widths, torch.arange(64), torch.arange(64), SOURCE)
        assert torch.equal(accepted, expected)
        assert torch.equal(following, best.gather(1, expected[:, None])[:, 0])


def test_equal_distributions_always_accept_and_ids_of_probability_zero_never_come() -> None:
    _, _, target, _ = _random_case(500, 1, 9)
    target = target.masked_fill(torch.arange(9) >= 6, 0)  # padding of the vocabulary
    target /= target.sum(-1, keepdim=True)
    seeds = torch.arange(500)
    drawn, law = draft_sample(target[:, 0].log(), torch.ones(500), seeds, seeds, 0, SOURCE)
    accepted, following = reject(drawn[:, None], law, target, torch.ones_like(seeds), seeds, seeds, SOURCE)
    assert float(accepted.double().mean()) > 0.999  # q is p up to one rounding of the softmax
    assert bool((drawn < 6).all())
    assert bool((following < 6).all())


def test_broken_rows_stay_their_own() -> None:
    drafts, draft_probs, target, widths = _random_case(8, 3, 5)
    seeds = torch.arange(8)
    clean = reject(drafts, law_from(draft_probs), target, widths, seeds, seeds, SOURCE)
    target[2, 0], target[3, 1, 2], draft_probs[4] = torch.nan, torch.inf, torch.nan
    accepted, following = reject(drafts, law_from(draft_probs), target, widths, seeds, seeds, SOURCE)
    for row in (0, 1, 5, 6, 7):
        assert (int(accepted[row]), int(following[row])) == (int(clean[0][row]), int(clean[1][row]))
    assert bool(((following >= 0) & (following < 5)).all())
    assert bool(((accepted >= 0) & (accepted <= widths)).all())
    assert int(accepted[4]) == 0  # a draft without a law is not accepted; the target's own token follows


# --------------------------------------------------------------------------------------------------------------- draft


def _kept(law: DraftLaw, drawn: Tensor, vocab_size: int) -> Tensor:
    """[B, V] q of drafts that were drawn one by one."""
    return dense(law, drawn[:, None], vocab_size)[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_are_drawn_from_the_distribution_that_is_kept(dtype: torch.dtype) -> None:
    """In bf16 from the rounded logits, which the law keeps as they are."""
    seeds = torch.arange(NUM_SEEDS)
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0]).to(dtype).expand(NUM_SEEDS, -1)
    drawn, law = draft_sample(logits, torch.full((NUM_SEEDS,), 0.6), seeds, 0 * seeds, 2, SOURCE)
    prob = _kept(law, drawn, 4)
    assert law.logits.dtype == dtype and law.logits.data_ptr() == logits.data_ptr(), "kept, not copied"
    torch.testing.assert_close(prob[0], (logits[0].float() / 0.6).softmax(0))
    assert _chi_square_passes(torch.bincount(drawn, minlength=4).double(), prob[0])
    assert torch.equal(drawn, SOURCE.categorical(prob, seeds, 0 * seeds, 0 * seeds + 2, Purpose.DRAFT))
    torch.testing.assert_close(law.of(drawn[:, None])[:, 0], prob.gather(1, drawn[:, None])[:, 0])


def test_laws_of_float64_are_float64() -> None:
    """The enumerations hold the ops to rounding in float64."""
    logits, seeds = torch.randn(9, 5, dtype=torch.float64), torch.arange(9)
    drawn, law = draft_sample(logits, torch.full((9,), 0.7), seeds, seeds, 0, SOURCE)
    exact = (logits / torch.tensor(0.7).double()).softmax(-1)
    torch.testing.assert_close(_kept(law, drawn, 5), exact, rtol=0, atol=1e-15)


def test_greedy_drafts_are_one_hot() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0]] * 3)
    seeds = torch.arange(3)
    for heat, sample in ((torch.ones(3), False), (torch.zeros(3), True)):
        drawn, law = draft_sample(logits, heat, seeds, seeds, 0, SOURCE, sample=sample)
        assert drawn.tolist() == [1, 1, 1]
        assert _kept(law, drawn, 3).tolist() == [[0.0, 1.0, 0.0]] * 3
        assert law.of(drawn[:, None]).tolist() == [[1.0]] * 3
        torch.testing.assert_close(law.read(drawn[:, None])[:, 0], logits.softmax(-1)[:, 1])  # what a confidence reads


def test_a_reduced_draft_vocabulary_stays_reduced_and_is_spread_where_it_is_read() -> None:
    logits = torch.randn(50, 3)
    seeds, ids = torch.arange(50), torch.tensor([1, 4, 6])
    drawn, law = draft_sample(logits, torch.ones(50), seeds, seeds, 0, SOURCE, token_ids=ids)
    prob = _kept(law, drawn, 8)
    torch.testing.assert_close(prob[:, ids], logits.softmax(-1))
    assert law.logits.shape == (50, 1, 3) and prob.shape == (50, 8)
    torch.testing.assert_close(prob.sum(-1), torch.ones(50))
    assert set(drawn.tolist()) == {1, 4, 6}
    for token in range(8):
        torch.testing.assert_close(law.of(torch.full((50, 1), token))[:, 0], prob[:, token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_laws_of_a_block_are_those_of_its_drafts(dtype: torch.dtype) -> None:
    """Joined over logits that lie side by side, nothing is copied; rejection gives what dense laws give."""
    generator = torch.Generator().manual_seed(2)
    logits = (2 * torch.randn(64, 3, 11, generator=generator)).to(dtype)
    heat, seeds = torch.rand(64, generator=generator).round() * 0.8, torch.arange(64)
    pairs = [draft_sample(logits[:, j], heat, seeds, seeds, j, SOURCE) for j in range(3)]
    drafts = torch.stack([drawn for drawn, _ in pairs], dim=1)
    whole = DraftLaw.join([law for _, law in pairs])
    assert torch.equal(whole.logits, logits) and whole.logits.data_ptr() == logits.data_ptr()
    apart = DraftLaw.join([replace(law, logits=law.logits.clone()) for _, law in pairs])
    assert torch.equal(apart.logits, logits)
    again = DraftLaw.join([pairs[0][1], pairs[0][1], pairs[2][1]])  # rows, but not one after the other
    assert torch.equal(again.logits, logits[:, [0, 0, 2]])
    prob = dense(whole, drafts, 11)
    widths, target = torch.full((64,), 3), (logits.float() + 0.3).mul(0.7).softmax(-1)
    target = torch.cat([target, target[:, :1]], dim=1)
    for one, other in zip(
        reject(drafts, whole, target, widths, seeds, seeds, SOURCE),
        reject(drafts, law_from(prob), target, widths, seeds, seeds, SOURCE), strict=True,
    ):  # fmt: skip
        assert torch.equal(one, other)


def test_sequences_without_drafts_stand_behind_those_with_a_law() -> None:
    drafts, draft_probs, target, widths = _random_case(8, 3, 5)
    seeds = torch.arange(8)
    widths[5:] = 0
    whole = reject(drafts, law_from(draft_probs), target, widths, seeds, seeds, SOURCE)
    for one, other in zip(
        whole, reject(drafts, law_from(draft_probs[:5]), target, widths, seeds, seeds, SOURCE), strict=True
    ):
        assert torch.equal(one, other)
