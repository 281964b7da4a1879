"""Exact enumeration of what a sequence emits in three consecutive steps, with the engine's own stages and drafters.

Tiny real networks in float64. A step is run by the engine's stages (load, draft, layout, fill, verify, accept, apply), for
every state that the steps before can have left and for all outcomes of all its draws at once: a *row* has one outcome of
each draw, and `Outcomes` hands them to the ops and weighs the row by their probability. Rows that emit the same are one
state of the next step; it lives in a slot that was copied from one of these rows, KV with whatever drafts left in it
included. What three steps emitted is continued by the target up to 3 (S + 1) tokens: the joint law of those must be that
of plain decoding, computed by a dense forward and the definitions of the request's parameters (`shaping`).

Draws have the names that the engine gives them: (purpose, anchor, offset). A name that is read twice means one uniform,
and its second outcome is conditioned on the first; the anchor must be the sequence's own, so that steps share no name.

What a mode adds is the width, and what it may look at: `Widths`. States with another width to come are other states.
Token strings are numbered by length, and within a length in base V.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import product
from typing import NamedTuple, Protocol
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream import ledger
from slipstream.cache.pages import NUM_RESERVED_PAGES
from slipstream.cache.pool import KVPool
from slipstream.config import SamplingParams
from slipstream.constraint import Constraint
from slipstream.device.backend import TorchBackend
from slipstream.device.batch import Batch, RaggedBatch
from slipstream.device.state import make_slot_state
from slipstream.draft.base import Draft, DraftView
from slipstream.draft.block import BlockDraft
from slipstream.draft.ngram import NGramDraft
from slipstream.masking import Constrainer, struck
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter
from slipstream.models.layers import DenseAttend
from slipstream.ops.noise import Purpose
from slipstream.ops.reject import DraftLaw
from slipstream.plan import NUM_ACCEPTED, NUM_VERDICT_COLUMNS, Admission, Decision, StepPlan
from slipstream.request import Request
from slipstream.scheduler import _edits_of
from slipstream.testing import TableMatcher, tiny_drafter_spec, tiny_spec
from slipstream.verify.accept import RejectionRule, SamplingView
from slipstream.verify.target import Target
from tests.lossless.laws import only_of
from tests.lossless.shaping import plain_shape

S = 2
STEPS = 3
V = 3
HORIZON = STEPS * (S + 1)
PROMPT = (0, 2, 1, 0)  # its last token was there before, so that look-up finds something
PAGE = len(PROMPT) + HORIZON + 1  # tokens: a slot needs one page
END = 2  # what min_tokens bans
F64 = torch.float64
TINY = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}

# A grammar as an automaton, [state, token] -> state, -1: forbidden. It goes on for ever: no token follows itself, but 0 once.
GRAMMAR = np.array([[1, 2, 3], [4, 2, 3], [1, -1, 3], [1, 2, -1], [-1, 2, 3]])

# ----------------------------------------------------------------------------------------------------------- networks


@contextmanager
def in_double() -> Iterator[None]:
    """Where the engine goes to fp32 it goes to float64 instead: what is tested is the law, not its rounding."""
    with patch.object(torch.Tensor, "float", torch.Tensor.double), torch.inference_mode():
        yield


@cache
def target() -> Decoder:
    decoder = Decoder(tiny_spec(vocab_size=V, num_hidden_layers=1, **TINY), dtype=F64)
    decoder.init_random(seed=4, std=0.6)
    return decoder.eval().requires_grad_(False)


NETWORKS: dict[str, tuple[str, dict[str, object]]] = {
    "dflash": ("dflash", {}),
    "vanilla": ("dspark", {}),
    "gated": ("dspark", {"markov_head_type": "gated"}),
    "rnn": ("dspark", {"markov_head_type": "rnn"}),
    "reduced": ("dspark", {"draft_vocab_size": 2}),
}
DRAFTERS = (*NETWORKS, "ngram")


@cache
def network(name: str) -> BlockDrafter:
    algorithm, fields = NETWORKS[name]
    own = {"num_hidden_layers": 1, "target_layer_ids": [0], "num_target_layers": 1, "block_size": S + 1, **TINY}
    own |= {"markov_rank": 4} if algorithm == "dspark" else {}
    spec = tiny_drafter_spec(target().spec, algorithm, **{**own, **fields})
    made = BlockDrafter(spec, dtype=F64).eval().requires_grad_(False)
    if spec.draft_vocab_size is not None:
        made.set_draft_vocabulary(torch.tensor([0, 2]))
    made.init_random(seed=5, std=0.45)
    made.share(target())
    return made


# -------------------------------------------------------------------------------------------------------------- draws

Name = tuple[Purpose, Tensor, Tensor]  # purpose, anchor, offset


class Outcomes:
    """A `RandomSource` whose outcomes are given: row r of a step has `choices[purpose][r]`, its seed is r."""

    def __init__(self, rename: Callable[[Purpose, Tensor, Tensor], Name] = lambda *name: name) -> None:
        """rename: what a faulty engine would call a draw."""
        self._rename = rename

    def deal(self, choices: dict[Purpose, Tensor], anchor: Tensor) -> None:
        """Outcomes [R, n] of the draws to come, the n-th for offset n (any offset where n is 1); anchor [R]."""
        self._choices, self._anchor = choices, anchor
        self.weight = torch.ones(len(anchor), dtype=F64)
        self._low = torch.zeros(len(anchor), len(Purpose), S + 1, dtype=F64)
        self._high = torch.ones_like(self._low)

    def deal_more(self, choices: dict[Purpose, Tensor], parents: Tensor) -> None:
        """The same rows go on, each as many times as it is among parents [R']."""
        low, high = self._low[parents], self._high[parents]
        self.deal(choices, self._anchor[parents])
        self._low, self._high = low, high

    def bernoulli(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        return self.categorical(torch.stack([prob, 1 - prob], dim=1), seed, anchor, offset, purpose) == 0

    def categorical(self, prob: Tensor, seed: Tensor, anchor: Tensor, offset: Tensor, purpose: Purpose) -> Tensor:
        choices = self._choices[purpose]
        choice = choices[seed, offset.clamp(max=choices.shape[1] - 1)]
        purpose, anchor, offset = self._rename(purpose, anchor, offset)
        assert torch.equal(anchor, self._anchor[seed]), "a draw is named after another step"
        share = prob.double() / prob.double().sum(-1, keepdim=True)
        high = share.cumsum(-1).gather(1, choice[:, None])[:, 0]
        low = high - share.gather(1, choice[:, None])[:, 0]
        known_low, known_high = self._low[seed, purpose, offset], self._high[seed, purpose, offset]
        low, high = torch.maximum(low, known_low), torch.minimum(high, known_high)
        room = known_high - known_low
        factor = torch.where(room > 0, (high - low).clamp(min=0) / torch.where(room > 0, room, 1), 0)
        self.weight.scatter_reduce_(0, seed, factor, "prod")
        self._low[seed, purpose, offset], self._high[seed, purpose, offset] = low, torch.maximum(low, high)
        return choice


def _laws_of(draft: Draft, rows: Tensor) -> DraftLaw | None:
    return None if draft.law is None else only_of(draft.law, rows)


def _check_weights(weight: Tensor, parents: int) -> None:
    total = weight.view(parents, -1).sum(1)
    assert float((total - 1).abs().max()) < 1e-12, "a draw is missing, or not a law"


# -------------------------------------------------------------------------------------------------------------- modes


class States(NamedTuple):
    """K states: what was emitted so far, how likely, and the width to come where it is known."""

    number: Tensor  # [K] of the string
    weight: Tensor  # [K]
    stored: Tensor  # [K] what `Widths.stored` left, 0 at first

    @staticmethod
    def start() -> "States":
        return States(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=F64), torch.zeros(1, dtype=torch.int64))


class Widths(Protocol):
    """What a mode makes of the width of one sequence."""

    signal: str  # that the drafter is asked for

    def draft_length(self, step: int) -> int: ...

    def widths(self, step: int, states: States, signal: Tensor) -> Tensor:
        """[R] from the state and the drafter's signal [R, d] of each row."""

    def stored(self, signal: Tensor) -> Tensor:
        """[R] what this step's signal leaves to the next step, numbers below `num_stored`."""

    num_stored: int


# ------------------------------------------------------------------------------------------------------------- a walk


class _LawIsKnown(SamplingView):
    """What it is given for logits is the law already."""

    __slots__ = ()

    def law(self, batch: Batch, logits: Tensor, drafts: Tensor) -> Tensor:
        return logits


@dataclass
class Tally:
    """That a walk met what it is meant to test; over rows of positive weight."""

    accepted: int = 0
    rejected: int = 0
    pruned: int = 0
    widths: set[int] = field(default_factory=set)


class Walk:
    """One request under rejection, with one drafter, in one mode."""

    def __init__(
        self, drafter: str, params: SamplingParams, widths: Widths, *, sample_drafts: bool = True,
        outcomes: Outcomes | None = None,
    ) -> None:  # fmt: skip
        self.params, self.widths, self.name = params, widths, drafter
        self.outcomes, self.tally = outcomes or Outcomes(), Tally()
        self.request = Request(
            uid=1, prompt_ids=PROMPT, params=params, seed=0, eos_token_ids=frozenset([END]),
        )  # fmt: skip
        self.rule = RejectionRule(sample_drafts and drafter != "ngram", source=self.outcomes)  # type: ignore[arg-type]
        self.draws = drafter != "ngram"
        self.law_dtypes = set[torch.dtype]()  # of what drafts were drawn from
        self.draft_columns = (0, 1) if drafter == "reduced" else tuple(range(V))
        self.num_slots = _most_states(widths.num_stored) * (len(self.draft_columns) ** S if self.draws else 1)
        self._assemble()

    def law(self) -> Tensor:
        """[V ** HORIZON] joint law of the tokens that three steps and the target behind them emit."""
        with in_double():
            self._prefill()
            states = States.start()
            for step in range(STEPS):
                states = self._step(step, states)
            return continued(self.params, states.number, states.weight)

    # ------------------------------------------------------------------ parts, as `backends.torch_parts` has them

    def _assemble(self) -> None:
        device, networks = torch.device("cpu"), [] if self.name == "ngram" else [network(self.name)]
        with patch("slipstream.device.state.MAX_EDITS", 8):
            state = make_slot_state(self.num_slots, PAGE, PAGE, device)
        self.pools = tuple(
            KVPool(
                num_layers=spec.num_layers, num_pages=self.num_slots + NUM_RESERVED_PAGES, page_size=PAGE,
                num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=F64, device=device,
            )
            for spec in (target().spec, *(each.spec for each in networks))
        )  # fmt: skip
        state.page_table[: self.num_slots, 0] = torch.arange(self.num_slots) + NUM_RESERVED_PAGES
        self.drafter = BlockDraft(networks[0], self.pools[1], V) if networks else NGramDraft(device)
        self.target = Target(target(), self.pools[0], self.drafter.tap_layers, V)
        self.backend = TorchBackend(state, PAGE, self.pools, device)

    def _prefill(self) -> None:
        """Slot 0 holds the prompt, all but its last token computed: that is the first anchor."""
        params = self.params
        admission = Admission(
            slot=0, token_ids_np=np.array(PROMPT, np.int32), temperature=params.temperature, top_k=params.top_k,
            top_p=params.top_p, seed=0, num_prompt=len(PROMPT), min_p=params.min_p,
            repetition_penalty=params.repetition_penalty, frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty, edits=_edits_of(self.request),
        )  # fmt: skip
        page = self.backend.state.page_table[0, 0].clone()
        plan = self._plan(0, np.zeros(1, np.int64), 0, context=0, num_given=len(PROMPT) - 1, admissions=(admission,))
        loaded = self.backend.load(plan)
        self.backend.state.page_table[0, 0] = page
        shape = self.backend.verify_shape(plan, _decision(np.zeros(1, np.int64)))
        batch = self.backend.layout(loaded, torch.zeros(1, dtype=torch.int64), shape)
        features = self.target.verify(batch, batch.token_ids, shape)[1]
        self._absorb(features, batch)
        self.backend.state.context[0] = len(PROMPT) - 1

    # ------------------------------------------------------------------ a step

    def _step(self, step: int, states: States) -> States:
        num_drafts = self.widths.draft_length(step)
        # Draft: a slot for every state and every block that may be drafted.
        blocks = torch.tensor(list(product(self.draft_columns, repeat=num_drafts if self.draws else 0)))
        parent = torch.arange(len(states.number)).repeat_interleave(len(blocks))
        self._copy_slots(parent)
        count = len(parent)
        self.backend.state.seed[:count] = torch.arange(count)
        self.outcomes.deal({Purpose.DRAFT: blocks.repeat(len(states.number), 1)}, self.backend.state.context[:count])
        draft = self._draft(step, count, num_drafts)
        self.law_dtypes |= set() if draft.law is None else {draft.law.logits.dtype}
        drafted = self.outcomes.weight
        _check_weights(drafted, len(states.number))
        live = drafted.nonzero()[:, 0]
        draft = Draft(draft.token_ids[live], draft.signal[live], _laws_of(draft, live))
        parent = parent[live]
        # Verify: the target's rows of each.
        rows = States(*(x[parent] for x in states))
        widths = self.widths.widths(step, rows, draft.signal)
        stored = self.widths.stored(draft.signal)
        plan = self._plan(step, live.numpy(), num_drafts)
        loaded, decision = self.backend.load(plan), _decision(widths.numpy())
        shape = self.backend.verify_shape(plan, decision)
        batch = self.backend.layout(loaded, widths, shape)
        logits, features = self.target.verify(batch, self.backend.fill(batch, draft.token_ids), shape)[:2]
        self._absorb(features, batch)
        rule = self.rule.begin(self.backend.state, loaded, plan, V)
        if self.params.structured is not None:
            logits = struck(batch, logits, self._masks(plan, states, parent, draft.token_ids))
        law = rule.view.law(batch, logits, draft.token_ids)
        # Accept: every outcome of each.
        endings = torch.tensor(list(product(*[(0, 1)] * num_drafts, range(V))))
        among = torch.arange(len(live)).repeat_interleave(len(endings))
        endings = endings.repeat(len(live), 1)
        self.outcomes.deal_more({Purpose.ACCEPT: endings[:, :-1], Purpose.RESIDUAL: endings[:, -1:]}, live[among])
        result = self._judge(step, live[among], widths[among], draft, among, batch.cu_outputs, law)
        _check_weights(self.outcomes.weight, len(live))
        weight = (rows.weight * drafted[live])[among] * self.outcomes.weight
        self._count(weight, result, num_drafts)
        return self._settle(step, result, weight, rows.number[among], stored[among], live[among])

    def _draft(self, step: int, count: int, num_drafts: int) -> Draft:
        plan = self._plan(step, np.arange(count), num_drafts)
        loaded = self.backend.load(plan)
        rule = self.rule.begin(self.backend.state, loaded, plan, V)
        view = DraftView(loaded.slots, self.backend.state, int(plan.context_upper_bound_np.max()), step)
        return self.drafter.propose(view, num_drafts, rule, self.widths.signal)

    def _masks(self, plan: StepPlan, states: States, parent: Tensor, drafts: Tensor) -> dict[str, Tensor]:
        """Of the rows of each state, as the engine makes them; the rows of a state share its request."""
        requests = {}
        for state, number in enumerate(states.number.tolist()):
            constraint = Constraint(TableMatcher(GRAMMAR, (), ()), frozenset(), V)
            request = Request(uid=state, prompt_ids=PROMPT, params=self.params, seed=0, constraint=constraint)
            request._output_ids += string_of(number)
            requests[state] = request
        plan = replace(plan, uids_np=parent.numpy())
        return Constrainer(V, torch.device("cpu")).masks(plan, drafts.numpy(), requests)

    def _judge(
        self, step: int, slots: Tensor, widths: Tensor, draft: Draft, among: Tensor, cu_outputs: Tensor, law: Tensor
    ) -> Tensor:
        """Verdicts of rows that share slots: their laws are those of `among`, which were made once for all of them."""
        plan = self._plan(step, slots.numpy(), draft.token_ids.shape[1])
        loaded, shape = self.backend.load(plan), self.backend.verify_shape(plan, _decision(widths.numpy()))
        batch = self.backend.layout(loaded, widths, shape)
        rule = self.rule.begin(self.backend.state, loaded, plan, V)
        known = {each.name: getattr(rule.view, each.name) for each in fields(rule.view)}
        rule = replace(rule, view=_LawIsKnown(**{**known, "seed": torch.arange(len(slots))}))
        repeated = law[cu_outputs[among[batch.output_sequence]] + batch.output_offset]
        return rule.judge(batch, repeated, draft.token_ids[among], _laws_of(draft, among), shape).result

    def _settle(
        self, step: int, result: Tensor, weight: Tensor, number: Tensor, stored: Tensor, slots: Tensor
    ) -> States:
        """Rows that emitted the same become one state, which goes on in the slot of one of them."""
        accepted, emitted = result[:, NUM_ACCEPTED].long(), result[:, NUM_VERDICT_COLUMNS:].long()
        for place in range(emitted.shape[1]):
            number = torch.where(place <= accepted, appended(number, emitted[:, place]), number)
        key = number * self.widths.num_stored + stored
        live = weight > 0
        keys, index = torch.unique(key[live], return_inverse=True)
        total = torch.zeros(len(keys), dtype=F64).index_add_(0, index, weight[live])
        of = torch.zeros(len(keys), dtype=torch.int64).scatter_(0, index, live.nonzero()[:, 0])  # any of its rows
        if step < STEPS - 1:
            self._copy_slots(slots[of])
            plan = self._plan(step, np.arange(len(keys)), emitted.shape[1] - 1)
            self.backend.apply(self.backend.load(plan), result[of])
        return States(keys // self.widths.num_stored, total, keys % self.widths.num_stored)

    # ------------------------------------------------------------------ helpers

    def _copy_slots(self, sources: Tensor) -> None:
        """Slot i becomes a copy of slot sources[i], its KV included."""
        state, count = self.backend.state, len(sources)
        columns = [state.token_ids, state.context, state.temperature, state.top_k, state.top_p, state.min_p]
        columns += [getattr(state.shaping, name) for name in state.shaping.__slots__]
        for column in columns:
            column[:count] = column[sources]
        for pool in self.pools:
            for memory in (pool.keys, pool.values):
                pages = memory[:, NUM_RESERVED_PAGES:]
                pages[:, :count] = pages[:, sources]

    def _absorb(self, features: Tensor | None, batch: RaggedBatch) -> None:
        if features is not None:
            self.drafter.absorb(features, batch.positions, batch.kv_slots)

    def _plan(
        self, step: int, slots: NDArray[np.int64], num_drafts: int, *, context: int | None = None, num_given: int = 1,
        admissions: tuple[Admission, ...] = (),
    ) -> StepPlan:  # fmt: skip
        count = len(slots)
        decodes = context is None
        upper = PAGE - 1 - S if decodes else 0
        bits = ledger._wishes_of(self.request)

        def full(value: int, kind: type = np.int32) -> NDArray[np.int32]:
            return np.full(count, value, kind)

        return StepPlan(
            step=step, num_decode=count if decodes else 0, draft_length=num_drafts, slots_np=slots.astype(np.int32),
            generations_np=full(0), uids_np=full(1, np.int64), decode_steps_np=full(step), num_given_np=full(num_given),
            emits_np=np.full(count, decodes), caps_np=full(num_drafts), context_np=full(upper),
            context_upper_bound_np=full(upper), sampled_np=np.full(count, self.params.temperature > 0),
            teaches_np=np.full(count, True), admissions=admissions, page_writes_np=np.zeros((0, 3), np.int32),
            any_sampled=bits & ledger.SAMPLED > 0, any_top_k=bits & ledger.TOP_K > 0, any_top_p=bits & ledger.TOP_P > 0,
            any_min_p=bits & ledger.MIN_P > 0, any_penalty=bits & ledger.PENALTY > 0, any_edit=bits & ledger.EDIT > 0,
            any_constrained=self.params.structured is not None,
        )  # fmt: skip

    def _count(self, weight: Tensor, result: Tensor, num_drafts: int) -> None:
        result = result[weight > 0]
        widths, accepted = result[:, 0], result[:, NUM_ACCEPTED]
        self.tally.accepted += int(accepted.sum())
        self.tally.rejected += int((accepted < widths).sum())
        self.tally.pruned += int((widths < num_drafts).sum())
        self.tally.widths |= set(widths.unique().tolist())


def _decision(widths: NDArray[np.int64]) -> Decision:
    return Decision(widths_np=widths.astype(np.int32), budget=None, caps_np=widths.astype(np.int32))


def _most_states(num_stored: int) -> int:
    """Before the last step, times what may be stored with each."""
    most = STEPS - 1
    return num_stored * sum(V**n for n in range(most, most * (S + 1) + 1))


# ------------------------------------------------------------------------------------------------------------ strings


def first_of(length: int) -> int:
    """Number of the first string of a length; the empty one has number 0."""
    return (V**length - 1) // (V - 1)


def appended(number: Tensor, token: Tensor) -> Tensor:
    """Strings, each with one more token. Children of a string stand in the order of strings."""
    return number * V + 1 + token


def string_of(number: int) -> list[int]:
    tokens: list[int] = []
    while number:
        number, token = divmod(number - 1, V)
        tokens.insert(0, token)
    return tokens


@cache
def plain_steps(params: SamplingParams) -> tuple[Tensor, ...]:
    """For each length n below HORIZON [V ** n, V]: law of the token after each string of n, by dense forward."""
    laws = []
    for length, logits in enumerate(_dense_logits()):
        strings = list(product(range(V), repeat=length))
        if params.structured is not None:
            forbidden = torch.tensor([_forbidden_after(string) for string in strings])
            logits = logits.masked_fill(forbidden, -torch.inf)
        each = zip(logits.tolist(), strings, strict=True)
        shaped = torch.tensor([plain_shape(row, PROMPT, string, params, (END,)) for row, string in each], dtype=F64)
        laws.append(plain_probabilities(shaped, params))
    return tuple(laws)


def _forbidden_after(string: tuple[int, ...]) -> list[bool]:
    """[V]; nothing after a string that is forbidden itself: it has probability 0, and any law will do."""
    state = 0
    for token in string:
        state = int(GRAMMAR[state, token]) if state >= 0 else -1
    return [bool(after < 0) for after in GRAMMAR[state]] if state >= 0 else [False] * V


def plain_probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """[n, V] -> [n, V] by temperature, top-k, top-p and min-p, in this order and by their definitions; T > 0."""
    prob = (logits / params.temperature).softmax(-1)
    ordered, ids = prob.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(V).expand_as(ids)
    kept = place < (params.top_k or V)
    mass = ordered * kept
    before = mass.cumsum(-1) - mass
    kept &= before < params.top_p * mass.sum(-1, keepdim=True)
    kept &= ordered >= params.min_p * ordered[:, :1]
    left = torch.zeros_like(prob).scatter_(1, ids, ordered * kept)
    return left / left.sum(-1, keepdim=True)


@cache
def _dense_logits() -> list[Tensor]:
    """For each length n below HORIZON [V ** n, V] after the prompt and each string of n."""
    strings = torch.tensor(list(product(range(V), repeat=HORIZON - 1)))
    tokens = torch.cat([torch.tensor(PROMPT).expand(len(strings), -1), strings], dim=1)
    length = tokens.shape[1]
    with in_double():
        positions = torch.arange(length).repeat(len(tokens))
        hidden, _ = target()(tokens.flatten(), positions, DenseAttend(target().spec, (length,) * len(tokens)))
        logits = target().logits(hidden).view(len(tokens), length, V)
    return [logits[:: V ** (HORIZON - 1 - n), len(PROMPT) - 1 + n] for n in range(HORIZON)]


def continued(params: SamplingParams, number: Tensor, weight: Tensor) -> Tensor:
    """[V ** HORIZON] the law of full strings, from strings of any length, which the target continues."""
    emitted = torch.zeros(first_of(HORIZON + 1), dtype=F64).index_add_(0, number, weight)
    law = emitted[:1]
    for length, steps in enumerate(plain_steps(params)):
        law = (law[:, None] * steps).flatten() + emitted[first_of(length + 1) : first_of(length + 2)]
    return law


def plain_joint(params: SamplingParams) -> Tensor:
    """[V ** HORIZON] what plain decoding emits."""
    law = torch.ones(1, dtype=F64)
    for steps in plain_steps(params):
        law = (law[:, None] * steps).flatten()
    return law
