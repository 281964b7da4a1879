"""Exact enumeration of what two sequences emit in two consecutive steps, with the engine's own ops in float64.

A toy of V token ids: target p(x | last), drafter q(x | last), S = 2 drafts. A *world* fixes the outcome of every draw
that a step can name; `WorldSource` hands these outcomes to the ops and weighs the world by their probabilities, so that
one batched call runs all worlds of a step, two rows each. What the two steps emitted is continued by the target up to
2 * (S + 1) tokens; the joint law of both continuations must be the product of the target's.

A name that is read twice shows: within a step it fails at once; across steps the source remembers the interval of the
underlying uniform that the first outcome stands for, and the second outcome is conditioned on it. (Names of a correct
engine are never read again, so nothing is remembered and equal states share one evaluation.)

With `Toy.asked` the requests ask for penalties, biases, bans or filters: rows are made by the engine's ops from the
sequences' histories, and the target's law by `shaping.plain_law`. States are then told apart by their whole history.

Indices of token strings: all strings of length 1, then all of length 2, ...; within a length, base V.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.config import SamplingParams
from slipstream.ops.noise import Purpose, RandomSource
from slipstream.ops.reject import DraftLaw, draft_sample, reject
from slipstream.ops.sample import filter_logits, probabilities
from slipstream.ops.shape_logits import Histories, shape_logits
from tests.lossless.shaping import asked_by, plain_law

S = 2
HORIZON = 2 * (S + 1)
F64 = torch.float64

Signals = tuple[float, ...] | None  # of one sequence, S of them; None: unknown
Decide = Callable[[tuple[Signals, Signals], NDArray[np.float64]], tuple[int, int]]  # (stored, fresh [2, S]) -> widths


@dataclass(frozen=True, eq=False)
class Toy:
    """A target and a drafter whose next token depends on the last one only."""

    target: Tensor  # [V, V] p(x | last)
    drafter: Tensor  # [V, Vd] q(x | last)
    head: Tensor  # [S, V] confidence of draft j, from the token before it
    temperature: tuple[float, float] = (1.0, 1.0)  # of the two sequences
    token_ids: Tensor | None = None  # [Vd] target ids of the drafter's columns, when they are fewer
    sample_drafts: bool = True
    asked: tuple[SamplingParams, SamplingParams] | None = None  # of the two sequences; temperature: as above
    ends: tuple[int, ...] = ()  # what min_tokens bans; here it ends nothing

    @property
    def vocab_size(self) -> int:
        return len(self.target)

    @property
    def draft_columns(self) -> tuple[int, ...]:
        """Columns of the drafter that may be drawn."""
        columns = torch.arange(self.drafter.shape[1]) if self.sample_drafts else self.drafter.argmax(-1).unique()
        return tuple(columns.tolist())

    def target_law(self) -> Tensor:
        """[2, V, V] what each sequence is sampled from after each last token, by the engine's own ops."""
        heat = torch.tensor(self.temperature, dtype=F64).repeat_interleave(self.vocab_size)
        off = torch.zeros_like(heat)
        logits = filter_logits(self.target.log().repeat(2, 1), heat, off, off + 1, any_top_k=False, any_top_p=False)
        return probabilities(logits, heat).view(2, self.vocab_size, self.vocab_size)

    def rows(self, sequences: tuple["Sequence", "Sequence"], context: Tensor) -> Tensor:
        """[R, n, V] laws of the rows after each of context [R, n], the anchor and drafts, by the engine's own ops."""
        odd = torch.arange(len(context)) % 2
        if self.asked is None:
            return self.target_law()[odd[:, None], context]
        blocks = itertools.product(range(self.vocab_size), repeat=context.shape[1] - 1)
        every = torch.tensor([[s.last, *block] for block in blocks for s in sequences])
        laws = self._rows_of(sequences, every)  # of each block once: it stands in many worlds
        return laws[2 * _number(context[:, 1:].flip(1), self.vocab_size) + odd]

    def _rows_of(self, sequences: tuple["Sequence", "Sequence"], context: Tensor) -> Tensor:
        """As `rows`, for the two sequences in turn."""
        assert self.asked is not None
        odd = torch.arange(len(context)) % 2
        known = [s.known or (s.last,) for s in sequences]
        longest = max(map(len, known))
        token_ids = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in known])
        shaping = asked_by(self.asked, [1, 1], [self.ends] * 2, F64)
        num_known, row = torch.tensor([len(ids) for ids in known])[odd], torch.arange(len(context))
        top_k, heat, top_p, min_p = (
            torch.tensor([getattr(p, name) for p in self.asked])[odd]
            for name in ("top_k", "temperature", "top_p", "min_p")
        )
        flags = {"any_top_k": any(p.top_k for p in self.asked), "any_top_p": any(p.top_p < 1 for p in self.asked)}
        laws, logits = [], self.logits_of(sequences, context)
        for offset in range(context.shape[1]):
            drafts_before = torch.full_like(row, offset)
            histories = Histories(token_ids, longest, odd, num_known, context[:, 1:], row, drafts_before)
            shaped = shape_logits(logits[:, offset], shaping, histories)
            laws.append(probabilities(filter_logits(shaped, heat, top_k, top_p, min_p=min_p, **flags), heat))
        return torch.stack(laws, dim=1)

    def logits_of(self, sequences: tuple["Sequence", "Sequence"], context: Tensor) -> Tensor:
        """[R, n, V] of the rows after each of context [R, n], of the two sequences in turn, as acceptance gets them."""
        return self.target[context].log()

    def plain_logits(self, index: int, start: int, before: tuple[int, ...]) -> Tensor:
        """[V] of sequence `index` after a prompt of one token and an output, by definition."""
        return self.target[before[-1] if before else start].log()

    def signal(self, name: str, before: Tensor, drafts: Tensor) -> Tensor:
        """[R, S] raw confidence. `head` and `peak` see the token before each draft [R, S], `drawn` the draft too."""
        if name == "head":
            return self.head[torch.arange(S), before]
        if name == "peak":
            return self.drafter[before].amax(-1)
        columns = drafts if self.token_ids is None else torch.searchsorted(self.token_ids, drafts.contiguous())
        return self.drafter[before].gather(-1, columns[..., None])[..., 0]


@dataclass(frozen=True)
class Sequence:
    """All that a step depends on. Positions are relative to the anchor, so that equal states share one evaluation."""

    last: int
    stored: Signals = None
    memory: tuple[tuple[Purpose, int, int, float, float], ...] = ()  # purpose, position, offset; interval of u
    known: tuple[int, ...] = ()  # with `Toy.asked`: a prompt of one token, and the output


@dataclass(frozen=True)
class Variant:
    """What the engine does in a step, or what a faulty one would."""

    decide: Decide | None  # None: no drafter
    signal: str = "head"
    lagged: bool = False  # the next step reads this one's confidence
    reject: Callable[..., tuple[Tensor, Tensor]] = reject
    wrap: Callable[[RandomSource], RandomSource] = lambda source: source


@dataclass
class Tally:
    """That a run met what it is meant to test; over worlds of positive weight."""

    accepted: int = 0
    rejected: int = 0
    pruned: int = 0
    widths: set[tuple[int, ...]] = field(default_factory=set)


_ONE = torch.tensor(1, dtype=torch.int8)


@cache
def _all_choices(vocab_size: int, draft_columns: tuple[int, ...], num_drafts: int) -> dict[Purpose, Tensor]:
    """[R, number of names] the outcome that each row assigns to each name of a step, for every purpose."""
    own = list(itertools.product(*[draft_columns] * num_drafts, *[(0, 1)] * num_drafts, range(vocab_size)))
    rows = torch.tensor(list(itertools.product(own, repeat=2))).view(-1, 2 * num_drafts + 1)
    split = rows.split([num_drafts, num_drafts, 1], dim=1)
    return dict(zip((Purpose.DRAFT, Purpose.ACCEPT, Purpose.RESIDUAL), split, strict=True))


class WorldSource:
    """Outcomes by name. Row 2 * world + sequence; a row's seed is its index, so that a wrong seed is a wrong name."""

    def __init__(self, toy: Toy, num_drafts: int, sequences: tuple[Sequence, Sequence]) -> None:
        self._choice = _all_choices(toy.vocab_size, toy.draft_columns, num_drafts)
        self._sequences = sequences
        self.weight = torch.ones(len(self._choice[Purpose.RESIDUAL]), dtype=F64)
        self._reads = torch.zeros(len(self.weight), len(Purpose), S + 1, S + 1, dtype=torch.int8)
        self.log: list[tuple[Purpose, Tensor, Tensor, Tensor, Tensor, Tensor]] = []  # seed, position, offset, low, high

    def bernoulli(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        return self.categorical(torch.stack([prob, 1 - prob], dim=1), seed, anchor, offset, purpose) == 0

    def categorical(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        assert not bool((anchor < 0).any()), "a name of an earlier step was read again"
        self._reads.index_put_((seed, torch.tensor(int(purpose)), anchor, offset), _ONE, accumulate=True)
        column = torch.zeros_like(offset) if purpose is Purpose.RESIDUAL else anchor + offset
        choice = self._choice[purpose][seed, column]
        share = prob / prob.sum(-1, keepdim=True)
        high = share.cumsum(-1).gather(1, choice[:, None])[:, 0]
        low = high - share.gather(1, choice[:, None])[:, 0]
        known_low, known_high = self._remembered(seed, anchor, offset, purpose)
        low, high = torch.maximum(low, known_low), torch.minimum(high, known_high)
        factor = (high - low).clamp(min=0) / (known_high - known_low)
        self.weight.scatter_reduce_(0, seed, factor, "prod")
        if bool((anchor > 0).any()):  # never in a correct engine: the next anchor lies beyond this one
            self.log.append((purpose, seed, anchor, offset, low, high))
        return choice

    def joint(self) -> Tensor:
        """[worlds] probability of each, once all draws of the step were made."""
        assert int(self._reads.max()) <= 1, "a name was read twice in one step"
        joint = self.weight.view(-1, 2).prod(1)
        total = float(joint.sum())
        assert abs(total - 1) < 1e-12, f"worlds weigh {total}: a draw is missing, or not a law"
        return joint

    def _remembered(self, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> tuple[Tensor, Tensor]:
        low, high = torch.zeros(len(seed), dtype=F64), torch.ones(len(seed), dtype=F64)
        for index, sequence in enumerate(self._sequences):
            for kind, position, at, lo, hi in sequence.memory:
                hit = (seed % 2 == index) & (anchor == position) & (offset == at) & (kind is purpose)
                low, high = low.masked_fill(hit, lo), high.masked_fill(hit, hi)
        return low, high


@dataclass(frozen=True, eq=False)
class Worlds:
    """One step in all worlds of positive weight. W worlds, two sequences."""

    weight: Tensor  # [W]
    accepted: Tensor  # [W, 2]
    widths: Tensor  # [W, 2]
    emitted: Tensor  # [W, 2] index of the emitted string
    drafts: Tensor  # [W, 2, S]
    signal: Tensor  # [W, 2, S]
    following: Tensor  # [W, 2] last emitted token
    rows: Tensor  # [W, 2] row in the source
    source: WorldSource


def simulate(toy: Toy, variant: Variant, sequences: tuple[Sequence, Sequence]) -> Worlds:
    """A step of the engine from given states: draft, decide, accept."""
    num_drafts = 0 if variant.decide is None else S
    source = WorldSource(toy, num_drafts, sequences)
    draws = variant.wrap(source)
    size = len(source.weight)
    seed, anchor = torch.arange(size), torch.zeros(size, dtype=torch.int64)
    last = torch.tensor([s.last for s in sequences]).repeat(size // 2)
    heat = torch.tensor(toy.temperature, dtype=F64).repeat(size // 2)
    before, laws = [last], []
    for offset in range(num_drafts):
        drawn, law = draft_sample(
            toy.drafter[before[-1]].log(), heat, seed, anchor, offset, draws,
            sample=toy.sample_drafts, token_ids=toy.token_ids,
        )  # fmt: skip
        before.append(drawn)
        laws.append(law)
    context = torch.stack(before, dim=1)  # [R, S + 1]
    drafts = context[:, 1:]
    kept = DraftLaw.join(laws) if laws else None
    signal = toy.signal(variant.signal, context[:, :-1], drafts) if num_drafts else torch.zeros(size, 0, dtype=F64)
    widths = _decide(variant, sequences, signal, drafts, toy.vocab_size)
    target = toy.rows(sequences, context)
    accepted, following = variant.reject(drafts, kept, target, widths, seed, anchor, draws)
    weight = source.joint()
    emitted = _string_index(torch.cat([drafts, following[:, None]], dim=1), accepted, following, toy.vocab_size)
    live = weight > 0

    def by_world(x: Tensor) -> Tensor:
        return x.reshape(size // 2, 2, *x.shape[1:])[live]

    rows = (by_world(x) for x in (accepted, widths, emitted, drafts, signal, following, seed))
    return Worlds(weight[live], *rows, source)


def _decide(
    variant: Variant, sequences: tuple[Sequence, Sequence], signal: Tensor, drafts: Tensor, vocab: int
) -> Tensor:
    """[R] widths; one call per distinct confidence of the two sequences."""
    if variant.decide is None:
        return torch.zeros(len(signal), dtype=torch.int64)
    label = _number(drafts.reshape(-1, 2 * S), vocab)  # confidence depends on the state and the drafts
    example = torch.zeros(vocab ** (2 * S), dtype=torch.int64).scatter_(0, label, torch.arange(len(label)))
    stored, known = (sequences[0].stored, sequences[1].stored), {}
    widths = []
    for pair in signal.reshape(-1, 2 * S)[example].numpy():
        key = pair.tobytes()
        if key not in known:
            known[key] = variant.decide(stored, pair.reshape(2, S))
        widths.append(known[key])
    return torch.tensor(widths)[label].reshape(-1)


def _number(digits: Tensor, base: int) -> Tensor:
    """[..., n] -> [...]"""
    return (digits * base ** torch.arange(digits.shape[-1])).sum(-1)


def _string_index(tokens: Tensor, accepted: Tensor, following: Tensor, vocab: int) -> Tensor:
    """[R, n] tokens of which `accepted` count, then `following` -> index of the string."""
    number = torch.zeros_like(accepted)
    for j in range(tokens.shape[1]):
        number = torch.where(j < accepted, number * vocab + tokens[:, j], number)
    return first_of_length(accepted + 1, vocab) + number * vocab + following


def first_of_length(length: Tensor, vocab: int) -> Tensor:
    starts = np.concatenate([[0, 0], np.cumsum([vocab**n for n in range(1, HORIZON)])])
    return torch.tensor(starts)[length]


def emitted_law(toy: Toy, variant: Variant, start: tuple[Sequence, Sequence], tally: Tally | None = None) -> Tensor:
    """[V^6, V^6] joint law of the next six tokens of both sequences, the first two steps being the engine's."""
    vocab = toy.vocab_size
    size = sum(vocab**n for n in range(1, HORIZON + 1))
    law = torch.zeros(size, size, dtype=F64)
    known: dict[tuple[Sequence, Sequence], Tensor] = {}
    first = simulate(toy, variant, start)
    _count(tally, first)
    appended = _append_table(vocab)
    for (one, two), states, weight in _branches(toy, variant, first, start):
        if states not in known:
            second = simulate(toy, variant, states)
            _count(tally, second)
            known[states] = _as_matrix(second, len(appended))
        law[appended[one][:, None], appended[two][None, :]] += weight * known[states]
    one, two = (continuation(toy, index, sequence) for index, sequence in enumerate(start))
    return one.T @ law @ two


def _branches(
    toy: Toy, variant: Variant, worlds: Worlds, start: tuple[Sequence, Sequence]
) -> Iterator[tuple[tuple[int, int], tuple[Sequence, Sequence], float]]:
    """Outcomes of a step: the two emitted strings, the states they lead to, and the probability."""
    label = worlds.emitted
    if variant.lagged:
        label = label * toy.vocab_size**S + _number(worlds.drafts, toy.vocab_size)
    labels, index = torch.unique(label, dim=0, return_inverse=True)
    weight = torch.zeros(len(labels), dtype=F64).index_add_(0, index, worlds.weight)
    example = torch.zeros(len(labels), dtype=torch.int64).scatter_(0, index, torch.arange(len(index)))
    for world, share in zip(example.tolist(), weight.tolist(), strict=True):
        one, two = (
            replace(_next_state(variant, worlds, world, sequence), known=_known(toy, worlds, world, sequence, before))
            for sequence, before in enumerate(start)
        )
        yield tuple(worlds.emitted[world].tolist()), (one, two), share


def _known(toy: Toy, worlds: Worlds, world: int, sequence: int, before: Sequence) -> tuple[int, ...]:
    """History of a sequence that the step left; nothing where no law depends on it."""
    if toy.asked is None:
        return ()
    accepted = worlds.drafts[world, sequence, : int(worlds.accepted[world, sequence])].tolist()
    return (*(before.known or (before.last,)), *accepted, int(worlds.following[world, sequence]))


def _next_state(variant: Variant, worlds: Worlds, world: int, sequence: int) -> Sequence:
    last = int(worlds.following[world, sequence])
    if not variant.lagged:
        return Sequence(last)
    row, moved = int(worlds.rows[world, sequence]), int(worlds.accepted[world, sequence]) + 1
    memory = []
    for purpose, seed, position, offset, low, high in worlds.source.log:
        for k in torch.nonzero((seed == row) & (position >= moved)).flatten().tolist():
            memory.append((purpose, int(position[k]) - moved, int(offset[k]), float(low[k]), float(high[k])))
    return Sequence(last, tuple(worlds.signal[world, sequence].tolist()), tuple(memory))


def _as_matrix(worlds: Worlds, size: int) -> Tensor:
    matrix = torch.zeros(size, size, dtype=F64)
    return matrix.index_put_(tuple(worlds.emitted.unbind(1)), worlds.weight, accumulate=True)


def _append_table(vocab: int) -> Tensor:
    """[strings of a step, strings of a step] index of the two put together."""
    strings = [s for n in range(1, S + 2) for s in itertools.product(range(vocab), repeat=n)]
    everything = (s for n in range(1, HORIZON + 1) for s in itertools.product(range(vocab), repeat=n))
    index = {s: i for i, s in enumerate(everything)}
    return torch.tensor([[index[a + b] for b in strings] for a in strings])


def _steps(toy: Toy, index: int, start: Sequence) -> Tensor:
    """[V^6, 6] probability under the target of each token of each string of six, after those before it."""
    strings = list(itertools.product(range(toy.vocab_size), repeat=HORIZON))
    full = torch.tensor(strings)
    if toy.asked is None:
        before = torch.cat([torch.full((len(full), 1), start.last), full[:, :-1]], dim=1)
        return toy.target_law()[index][before, full]
    assert len(start.known) <= 1, start
    params, known = toy.asked[index], {}

    def prob(before: tuple[int, ...], token: int) -> float:
        if before not in known:
            logits = toy.plain_logits(index, start.last, before)
            scores = plain_law(logits, [start.last], before, params, toy.ends)
            known[before] = probabilities(scores, torch.tensor([params.temperature]))[0].tolist()
        return known[before][token]

    return torch.tensor([[prob(s[:n], s[n]) for n in range(HORIZON)] for s in strings], dtype=F64)


def continuation(toy: Toy, index: int, start: Sequence) -> Tensor:
    """[strings, V^6] probability that a string grows into each string of six tokens, under the target."""
    vocab, steps = toy.vocab_size, _steps(toy, index, start)
    blocks = []
    for n in range(1, HORIZON + 1):
        rest = steps[:, n:].prod(1)
        prefix = torch.arange(len(steps)) // vocab ** (HORIZON - n)
        blocks.append(torch.zeros(vocab**n, len(steps), dtype=F64).index_put_((prefix, torch.arange(len(steps))), rest))
    return torch.cat(blocks)


def target_joint(toy: Toy, start: tuple[Sequence, Sequence]) -> Tensor:
    """[V^6, V^6] what plain sampling of two independent sequences emits."""
    one, two = (_steps(toy, index, sequence).prod(1) for index, sequence in enumerate(start))
    return torch.outer(one, two)


def _count(tally: Tally | None, worlds: Worlds) -> None:
    if tally is None:
        return
    tally.accepted += int(worlds.accepted.sum())
    tally.rejected += int((worlds.accepted < worlds.widths).sum())
    tally.pruned += int((worlds.widths < worlds.drafts.shape[-1]).sum())
    tally.widths |= {tuple(w) for w in torch.unique(worlds.widths, dim=0).tolist()}
