"""Are sampled answers drawn from the target's law? A chi-square of their tokens against the target's own probabilities.

The target reads the answers as they are (teacher forcing, by a dense forward that shares nothing with the engine's
attention, cache or layout) and gives the law of every token behind its own prefix. Given the prefixes, the tokens at one
place of n independent answers are n independent draws from n known laws; so how often a cell is hit has a known mean
and a known covariance, sum of diag(p) - p p', and the quadratic form of the difference is chi-square with as many
degrees as that covariance has directions. No second sample adds its noise, and prefixes may differ from answer to answer.

Cells at one place: (prompt, token) expected at least `MIN_EXPECTED` times, all rarer tokens of a prompt pooled. Over all
places beyond the first together: ranks of the target's own probabilities. Which cells there are depends on prefixes
only, never on the tokens that are counted. Called by `verify_exact`; knows nothing of modes and engines.

Letters in shapes: n answers, T tokens each, V token ids, K cells.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.lab.verify_exact_shape import Shape
from slipstream.load import Models
from slipstream.models.layers import DenseAttend
from slipstream.ops.sample import filter_logits, probabilities

MIN_EXPECTED = 10.0  # of a cell; less and its count is too far from normal for the odds that are stated
MIN_VARIANCE = 5.0  # of a direction of the counts, for the same reason
RANK_EDGES = (1, 2, 4, 8, 16)  # ranks 1, 2, 3-4, 5-8, 9-16 and beyond
POWER = 0.9  # at which `visible` is stated
_ROWS = 256  # whose probabilities are held at a time
_F64 = torch.float64


@dataclass(frozen=True, slots=True, kw_only=True)
class LawTest:
    """One chi-square. `bias`: total variation over the cells; `chance`: what it would be on average by chance alone."""

    where: str  # token N, or ranks
    samples: int
    cells: int
    statistic: float
    degrees: int
    p_value: float | None  # None: nothing varies there
    bias: float
    chance: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# ------------------------------------------------------------------------------------------------------------ chi-square


@dataclass(slots=True)
class Counts:
    """How often cells were hit, and should have been: sums over independent draws (or a martingale's)."""

    size: int  # K
    num_draws: int = 0
    observed: Tensor = field(init=False)  # [K]
    expected: Tensor = field(init=False)  # [K]
    covariance: Tensor = field(init=False)  # [K, K]

    def __post_init__(self) -> None:
        self.observed, self.expected = torch.zeros(self.size, dtype=_F64), torch.zeros(self.size, dtype=_F64)
        self.covariance = torch.zeros(self.size, self.size, dtype=_F64)

    def add(self, prob: Tensor, cell: Tensor) -> None:
        """prob [n, K] of the cells, cell [n] the one that was hit."""
        prob = prob.to("cpu", _F64)
        self.num_draws += len(prob)
        self.observed += torch.bincount(cell.cpu(), minlength=self.size)
        self.expected += prob.sum(0)
        self.covariance += torch.diag(prob.sum(0)) - prob.T @ prob

    def test(self, where: str) -> LawTest:
        off = self.observed - self.expected
        variance, directions = torch.linalg.eigh(self.covariance)
        draws = max(1, self.num_draws)
        kept = variance >= MIN_VARIANCE
        degrees = int(kept.sum())
        statistic = float(((directions.T @ off)[kept] ** 2 / variance[kept]).sum())
        spread = (self.covariance.diagonal().clamp(min=0) * (2 / math.pi)).sqrt()
        return LawTest(
            where=where, samples=self.num_draws, cells=self.size, statistic=statistic, degrees=degrees,
            p_value=chi_square_tail(statistic, degrees) if degrees else None,
            bias=float(off.abs().sum()) / (2 * draws), chance=float(spread.sum()) / (2 * draws),
        )  # fmt: skip


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square of so many degrees >= statistic)."""
    halves = torch.tensor([degrees, statistic], dtype=_F64) / 2
    return float(torch.special.gammaincc(halves[0], halves[1]))


def visible(samples: int, degrees: int, odds: float) -> float:
    """How far a cell of probability 1/2 has to be off to be found in 9 of 10 runs, at false-alarm odds of one test.

    A smaller bias may be found too. Power by the cube-root approximation to the noncentral chi-square.
    """
    critical = _root(lambda x: odds - chi_square_tail(x, degrees), 0.0, 1e6)

    def power(excess: float) -> float:
        mean = degrees + excess
        spread = 2 * (1 + excess / mean) / (9 * mean)
        z = ((critical / mean) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
        return 0.5 * math.erfc(z / math.sqrt(2))

    return min(1.0, 0.5 * math.sqrt(_root(lambda x: power(x) - POWER, 0.0, 1e6) / samples))


def _root(function: Any, low: float, high: float) -> float:
    """Of a rising function."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return high


# --------------------------------------------------------------------------------------------------------- teacher forcing


@dataclass(frozen=True, slots=True, eq=False)
class Forced:
    """The target's states in front of every token of answers to one prompt."""

    prompt: Sequence[int]
    answers: Tensor  # [n, T] token ids; anything behind the end of an answer
    lengths: Tensor  # [n] tokens, on the host
    hidden: Tensor  # [n, T, H]: what the token of the same index is predicted from

    def rows(self, columns: Sequence[int]) -> Tensor:
        """[R, 2] answer and column of the tokens that there are in these columns."""
        inside = torch.tensor(columns)[None, :] < self.lengths[:, None]
        found = inside.nonzero()
        return torch.stack([found[:, 0], torch.tensor(columns)[found[:, 1]]], dim=1)


@torch.inference_mode()
def force(models: Models, prompt: Sequence[int], answers: Tensor, lengths: Sequence[int] | None = None) -> Forced:
    """answers [n, T] to one prompt, read behind it; lengths: where some of them are shorter."""
    target, device, count = models.target, models.device, len(prompt)
    prompt_ids, answers = torch.tensor(prompt, device=device), answers.to(device)
    stored: list[tuple[Tensor, Tensor]] = []
    dense = DenseAttend(target.spec)

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stored.append((k, v))
        return dense(layer, q, k, v)

    first, _ = target(prompt_ids, torch.arange(count, device=device), keep)
    parts = []
    for part in torch.split(answers[:, :-1], _ROWS):
        length = part.shape[1]
        positions = (count + torch.arange(length, device=device)).repeat(len(part))
        hidden = first[-1:].new_zeros(0, first.shape[1])
        if length:
            hidden, _ = target(part.flatten(), positions, _Behind(models, stored, len(part)))
        parts.append(hidden.view(len(part), length, first.shape[1]))
    before = first[-1].expand(len(answers), 1, -1)
    whole = torch.full((len(answers),), answers.shape[1])
    known = whole if lengths is None else torch.tensor(lengths)
    return Forced(prompt, answers, known, torch.cat([before, torch.cat(parts)], dim=1))


class _Behind:
    """Attention of equally long continuations [n * T rows] over a common prompt and, causally, over themselves."""

    def __init__(self, models: Models, stored: Sequence[tuple[Tensor, Tensor]], num_answers: int) -> None:
        self._spec, self._stored, self._count = models.target.spec, stored, num_answers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        both = [torch.cat([old.expand(self._count, *old.shape), self._by_answer(new)], dim=1).transpose(1, 2)
                for old, new in zip(self._stored[layer], (k, v), strict=True)]  # fmt: skip
        total, own = both[0].shape[2], len(q) // self._count
        age = torch.arange(total - own, total, device=q.device)[:, None] - torch.arange(total, device=q.device)
        window = self._spec.window(layer)
        mask = (age >= 0) & (age < (total if window is None else window))
        seen = F.scaled_dot_product_attention(
            self._by_answer(q).transpose(1, 2), both[0], both[1], attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        return seen.transpose(1, 2).flatten(0, 1).flatten(1)

    def _by_answer(self, rows: Tensor) -> Tensor:
        return rows.view(self._count, -1, *rows.shape[1:])


def laws(
    models: Models, hidden: Tensor, params: SamplingParams, shape: Shape | None = None, prompt: Sequence[int] = (),
    outputs: Sequence[Sequence[int]] = (),
) -> Tensor:  # fmt: skip
    """hidden [R, H] -> [R, V] what plain decoding samples from there. shape: by the prompt and R outputs before it."""
    logits = models.target.logits(hidden)[:, : models.vocab_size].float()
    if shape is not None:
        logits = shape(logits, prompt, outputs)
    heat = logits.new_full((len(logits),), params.temperature)
    return probabilities(filtered(logits, params), heat)


def filtered(logits: Tensor, params: SamplingParams) -> Tensor:
    """logits [R, V] after temperature and filters."""
    heat, top_p = (logits.new_full((len(logits),), value) for value in (params.temperature, params.top_p))
    top_k = torch.full((len(logits),), params.top_k, device=logits.device)
    min_p = logits.new_full((len(logits),), params.min_p) if params.min_p else None
    return filter_logits(
        logits, heat, top_k, top_p, min_p=min_p, any_top_k=params.top_k > 0, any_top_p=params.top_p < 1
    )


# ------------------------------------------------------------------------------------------------------------- the tests


@torch.inference_mode()
def law_tests(
    models: Models, answers: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], positions: Sequence[int],
    params: SamplingParams, shape: Shape,
) -> list[LawTest]:  # fmt: skip
    """answers: prompts, each with its answers. A test for each position (from 1), and one of ranks over the later ones."""
    length = max(positions)
    forced = [_forced(models, prompt, [tokens[:length] for tokens in each], length) for prompt, each in answers]
    law = _Law(models, params, shape)
    tests = [_at_position(law, forced, position) for position in positions]
    return tests + ([_of_ranks(law, forced, length)] if length > 1 else [])


def _forced(models: Models, prompt: Sequence[int], answers: Sequence[Sequence[int]], length: int) -> Forced:
    padded = torch.tensor([[*tokens, *[0] * (length - len(tokens))] for tokens in answers])
    return force(models, prompt, padded, list(map(len, answers)))


@dataclass(frozen=True, slots=True)
class _Law:
    """What plain decoding samples from."""

    models: Models
    params: SamplingParams
    shape: Shape

    def each(self, one: Forced, columns: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """[R, V] laws and [R] tokens of these columns, some rows at a time. An answer that has ended has none."""
        known = one.answers.cpu()
        for rows in torch.split(one.rows(columns), _ROWS):
            answer, column = rows[:, 0].to(one.hidden.device), rows[:, 1].to(one.hidden.device)
            outputs: list[list[int]] = []
            if not self.shape.is_neutral:
                outputs = [known[i, :j].tolist() for i, j in rows.tolist()]
            prob = laws(self.models, one.hidden[answer, column], self.params, self.shape, one.prompt, outputs)
            yield prob, one.answers[answer, column]


def _at_position(law: _Law, forced: Sequence[Forced], position: int) -> LawTest:
    """Tokens number `position` of all prompts; a prompt's counts do not mix with another's."""
    parts = []
    for one in forced:
        expected = torch.zeros(law.models.vocab_size, dtype=_F64, device=law.models.device)
        for prob, _ in law.each(one, [position - 1]):
            expected += prob.sum(0, dtype=_F64)
        often = torch.nonzero(expected >= MIN_EXPECTED).flatten()
        counts = Counts(len(often) + 1)
        for prob, token in law.each(one, [position - 1]):
            own = prob[:, often]
            hit = (token[:, None] == often).long()
            cell = torch.where(hit.any(1), hit.argmax(1) if len(often) else 0, len(often))
            counts.add(torch.cat([own, (1 - own.double().sum(1, keepdim=True)).clamp(min=0)], dim=1), cell)
        parts.append(counts)
    return _joined(parts).test(f"token {position}")


def _of_ranks(law: _Law, forced: Sequence[Forced], length: int) -> LawTest:
    """All tokens that may have been drafted, by the rank that the target gives them."""
    counts = Counts(len(RANK_EDGES) + 1)
    edges = torch.tensor(RANK_EDGES, device=law.models.device)
    for one in forced:
        for prob, token in law.each(one, range(1, length)):
            best = prob.topk(min(RANK_EDGES[-1], prob.shape[1]))
            upto = best.values.double().cumsum(1)[:, (edges - 1).clamp(max=best.values.shape[1] - 1)]
            share = torch.diff(upto, dim=1, prepend=torch.zeros_like(upto[:, :1]))
            share = torch.cat([share, (1 - upto[:, -1:]).clamp(min=0)], dim=1)
            hit = token[:, None] == best.indices
            rank = torch.where(hit.any(1), hit.long().argmax(1) + 1, RANK_EDGES[-1] + 1)
            counts.add(share, torch.searchsorted(edges, rank))
    return counts.test("ranks")


def _joined(parts: Sequence[Counts]) -> Counts:
    """Of different prompts: their cells side by side."""
    joined = Counts(sum(part.size for part in parts), sum(part.num_draws for part in parts))
    joined.observed = torch.cat([part.observed for part in parts])
    joined.expected = torch.cat([part.expected for part in parts])
    first = 0
    for part in parts:  # one block each: answers to different prompts are independent
        joined.covariance[first : first + part.size, first : first + part.size] = part.covariance
        first += part.size
    return joined
