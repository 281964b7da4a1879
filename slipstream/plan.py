"""The records that cross the border between host and device, once per step.

Down go `StepPlan` (before the draft) and `Decision` (after it was launched); up come `DraftReport` (right after the
draft) and `StepResult` (at the end). All are frozen, torch-free and hold numpy arrays; none is kept on an object
between two calls. Letters in shapes: B sequences of the step, D = `num_decode` of them that decode, d the draft length.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slipstream.config import MAX_BANS, MAX_BIASES
from slipstream.logprobs import Wanted

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]

EDGE = 1e-6  # confidences are kept this far from 0 and 1 before their logit is taken, on the host as on the device

# A verdict, as the device hands it on and sends it up, is a matrix [B, NUM_VERDICT_COLUMNS + W + 1] int32: these columns,
# then the target's tokens y_0 .. y_W, valid up to number n = accepted.
NUM_VERDICT_COLUMNS = 3
WIDTH, NUM_ACCEPTED, IS_INVALID = range(NUM_VERDICT_COLUMNS)


MAX_EDITS = MAX_BIASES + MAX_BANS  # of one request
FOREVER = 2**62  # tokens


class Edit(NamedTuple):
    """What is added to one token's logit while the output has fewer than `until` tokens."""

    token_id: int
    value: float  # -inf bans
    until: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Admission:
    """A slot's new owner: everything that the device must know of a request. Filled by the scheduler."""

    slot: int
    token_ids_np: Int32s  # [n] the prompt, and after a preemption the output so far
    temperature: float
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    seed: int  # 64 bits, signed
    num_cached: int = 0  # of the tokens; their KV is in the first of the slot's pages, which are full
    num_prompt: int = 0  # of the tokens; the output begins behind them
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    edits: tuple[Edit, ...] = ()  # at most MAX_EDITS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """What a step will do, as far as it is known before its draft. Filled by the scheduler.

    Sequences 0..D-1 decode (one given row, drafts possible), D..B-1 are being prefilled (given rows only).
    `context` is what was committed when the plan was made; the device may be ahead of it, by at most what lies in
    flight: `context_upper_bound` includes that. Plans share arrays that are the same from step to step: nobody writes
    to them.
    """

    step: int
    num_decode: int  # D
    draft_length: int  # d: drafts per decoding sequence in this step, 0 = no draft call
    slots_np: Int32s  # [B]
    generations_np: Int32s  # [B] of the slots, when the plan was made
    uids_np: Int64s  # [B] of the requests
    decode_steps_np: Int32s  # [B] decode steps of the request before this one
    num_given_np: Int32s  # [B] rows that are certain: 1 in decode, the chunk in prefill
    emits_np: Bools  # [B] False while prompt tokens remain after this step
    caps_np: Int32s  # [B] most drafts that may be verified (context end, pages, d); 0 in prefill
    context_np: Int32s  # [B] committed context length s
    context_upper_bound_np: Int32s  # [B] s at most, with what lies in flight
    sampled_np: Bools  # [B] temperature above 0
    teaches_np: Bools  # [B] False: the output is constrained, and shared estimators must not learn from it
    admissions: tuple[Admission, ...]
    page_writes_np: Int32s  # [n, 3] (slot, index in its page table, page): pages reserved since the last plan
    any_sampled: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool = False
    any_penalty: bool = False
    any_edit: bool = False
    logprobs: Wanted | None = None  # of whom they are reported; None: of nobody
    any_constrained: bool = False  # somebody who gains tokens may not have them all
    num_given: int = field(init=False)  # given rows of all; counted once, for several stages ask
    num_emitting: int = field(init=False)

    @property
    def num_sequences(self) -> int:
        return len(self.slots_np)

    @property
    def reads_prompts(self) -> bool:
        """Somebody wants log-probabilities of prompt tokens that are rows of this step."""
        return self.logprobs is not None and len(self.logprobs.prompts) > 0

    @property
    def any_filtered(self) -> bool:
        """Somebody asks for top-k, top-p or min-p."""
        return self.any_top_k or self.any_top_p or self.any_min_p

    @property
    def any_shaped(self) -> bool:
        """Somebody asks for penalties or edits of the logits."""
        return self.any_penalty or self.any_edit

    def is_same_step(self, other: "StepPlan") -> bool:
        """Whether it is the same plan, at whatever draft length: `replace` keeps the arrays."""
        return self.step == other.step and self.slots_np is other.slots_np

    def __post_init__(self) -> None:
        chunks = self.num_given_np[self.num_decode :].tolist()
        object.__setattr__(self, "num_given", self.num_decode + sum(chunks))
        object.__setattr__(self, "num_emitting", int(np.count_nonzero(self.emits_np)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """How many drafts are verified: a width per sequence, or a budget that the device hands out.

    Exactly one of `widths_np` and `budget` is set. With a budget, the device gives the K = `budget` drafts of largest
    fresh survival, within `caps_np`; the policy has made sure that K <= caps.sum(), so the row count is known here.
    """

    widths_np: Int32s | None  # [B]
    budget: int | None  # K
    caps_np: Int32s  # [B]
    reason: str = ""  # why nothing was pruned, for log and statistics
    num_draft_rows: int = field(init=False)

    def __post_init__(self) -> None:
        rows = int(np.add.reduce(self.widths_np)) if self.widths_np is not None else int(self.budget or 0)
        object.__setattr__(self, "num_draft_rows", rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftReport:
    """Confidence of one draft call, as the drafter said it (not calibrated). Filled by `take_confidence`."""

    step: int
    signal_np: Float32s  # [D, d] raw estimate of P(draft j accepted | drafts before j accepted), a probability


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step produced. Filled by `collect`."""

    step: int
    widths_np: Int32s  # [B] drafts that were verified
    num_accepted_np: Int32s  # [B] n, drafts only
    token_ids_np: Int32s  # [B, W + 1] the target's tokens y_0..y_n of emitting sequences; all else is undefined
    invalid_np: Bools  # [B] the target's logits were not finite

    @classmethod
    def of(cls, step: int, verdict_np: Int32s) -> "StepResult":
        """From a verdict whose memory is written again later."""
        verdict_np = verdict_np.copy()
        return cls(
            step=step,
            widths_np=verdict_np[:, WIDTH],
            num_accepted_np=verdict_np[:, NUM_ACCEPTED],
            token_ids_np=verdict_np[:, NUM_VERDICT_COLUMNS:],
            invalid_np=verdict_np[:, IS_INVALID] > 0,
        )
