"""Log-probabilities between device and user: how they are asked for, how they are sent, and the entries made of them.

A value is always log-softmax, in fp32, of the target's own logits: before penalties, biases, bans, temperature and
filters, so it says the same whatever else was asked for, drafted or pruned. Sent is a matrix of numbers (a *report*),
one row per token; entries are made of it when somebody reads them, for most rows wait for the end of an answer.
Filled by `verify.report`, taken apart by `commit`. Torch-free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]

# A report is a matrix [n, NUM_REPORT_COLUMNS + 2 K] int32: these columns, then K token ids, then their K values. Values
# are fp32 numbers, kept as their bits so that one matrix holds all.
NUM_REPORT_COLUMNS = 2
RANK, VALUE = range(NUM_REPORT_COLUMNS)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What the target said of one token, before penalties, biases, bans, grammar, temperature and filters."""

    token_id: int
    logprob: float  # natural logarithm of its probability
    rank: int  # 1: the most probable token; of equally probable ones the lower id comes first
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the most probable tokens, in order of rank


class PromptPart(NamedTuple):
    """Tokens of a prompt that a step reports: those at position + 1 and after, by the rows at `position` and after."""

    slot: int
    row: int  # first row of the step's batch, not counting the drafts before it
    position: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wanted:
    """Who of a step's sequences wants log-probabilities. Made by the ledger; there is none where nobody does."""

    sequences_np: Int64s  # [A] those that emit and want them of their output, as places in the plan
    num_top: int  # most top tokens that any of these asks for
    prompts: tuple[PromptPart, ...]
    num_prompt_top: int

    @property
    def num_prompt_rows(self) -> int:
        return sum(part.num_rows for part in self.prompts)


@dataclass(frozen=True, slots=True, eq=False)
class Reported:
    """What came back for a `Wanted`, as copies that may be kept."""

    outputs_np: Int32s  # [A, places, columns] by place in the step; behind the tokens that were emitted, anything
    prompts: tuple[Int32s, ...]  # per part [count, columns]

    @classmethod
    def of(cls, wanted: Wanted, sent_np: Int32s, num_token_ids: int) -> "Reported":
        """From all rows' numbers side by side, outputs first, in memory that is written again later."""
        sent = sent_np.copy()
        count, columns = wanted.num_prompt_rows, num_columns(wanted.num_prompt_top, num_token_ids)
        outputs, prompts = np.split(sent, [len(sent) - count * columns])
        ends = np.cumsum([part.num_rows for part in wanted.prompts])[:-1]
        return cls(
            outputs.reshape(max(len(wanted.sequences_np), 1), -1, num_columns(wanted.num_top, num_token_ids)),
            tuple(np.split(prompts.reshape(count, columns), ends)) if count else (),
        )


def num_columns(num_top: int, num_token_ids: int) -> int:
    """Of a report with so many top tokens, or as many as there are."""
    return NUM_REPORT_COLUMNS + 2 * min(num_top, num_token_ids)


class Logbook:
    """Reports of one request's tokens, in order."""

    def __init__(self) -> None:
        self.reports: list[Int32s] = []  # each [n, columns]; what others in the step asked for decides how many
        self.num_tokens = 0

    def add(self, report_np: Int32s) -> None:
        """report_np [n, columns] of the next n tokens. It is kept."""
        self.reports.append(report_np)
        self.num_tokens += len(report_np)

    def entries(self, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
        """Of the tokens, all of which were reported."""
        assert len(token_ids) == self.num_tokens, (len(token_ids), self.num_tokens)
        tokens = iter(token_ids)
        alike = (list(run) for _, run in groupby(self.reports, key=lambda report: report.shape[1]))
        return tuple(entry for run in alike for entry in entries(tokens, np.concatenate(run), num_top))


def entries(token_ids: Iterator[int], report_np: Int32s, num_top: int) -> Iterator[TokenLogprob]:
    """One entry per row of report_np [n, columns], with at most num_top top tokens; takes n of the token ids."""
    values_np = np.ascontiguousarray(report_np).view(np.float32)
    most = (report_np.shape[1] - NUM_REPORT_COLUMNS) // 2
    ids, values, kept = NUM_REPORT_COLUMNS, NUM_REPORT_COLUMNS + most, min(num_top, most)
    ranks, logprobs = report_np[:, RANK].tolist(), values_np[:, VALUE].tolist()
    tokens = list(islice(token_ids, len(ranks)))
    if not kept:
        return map(TokenLogprob, tokens, logprobs, ranks)
    columns = report_np[:, ids : ids + kept].tolist(), values_np[:, values : values + kept].tolist()
    return map(TokenLogprob, tokens, logprobs, ranks, map(tuple, map(zip, *columns)))
