"""Rejection sampling keeps the law of plain decoding under penalties, biases, bans and filters, exactly.

As test_enumeration.py, with laws that depend on the whole history: the engine's rows against the definitions in
`shaping`. The faulty rows live here only, and must change the law visibly.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.config import SamplingParams
from tests.lossless import enumeration
from tests.lossless.enumeration import Sequence, Tally, Toy, Variant, emitted_law, target_joint
from tests.lossless.test_enumeration import EXACT, MODES, THREE, TWO, VISIBLE

START = (Sequence(0), Sequence(1))


def _asked(*wishes: dict[str, object], temperature: tuple[float, float] = (1.0, 1.0)) -> dict[str, Any]:
    """Fields of a toy whose two sequences ask for these."""
    both = wishes if len(wishes) == 2 else wishes * 2
    params = [SamplingParams(temperature=t, **wish) for t, wish in zip(temperature, both, strict=True)]  # type: ignore[arg-type]
    return {"asked": tuple(params), "ends": (1,), "temperature": temperature}


PENALTIES: dict[str, object] = {"repetition_penalty": 1.3, "frequency_penalty": 0.35, "presence_penalty": 0.6}
WISHES: dict[str, dict[str, Any]] = {
    "repetition": _asked({"repetition_penalty": 1.7}),
    "frequency": _asked({"frequency_penalty": 0.5}, {"frequency_penalty": -0.4}),
    "presence": _asked({"presence_penalty": 0.9}),
    "bias": _asked({"logit_bias": {0: 0.7, 1: -0.3}}, {"logit_bias": {1: 1.1}}),
    "bans": _asked({"min_tokens": 2}, {"min_tokens": 4}),
    "all, and nothing": _asked({**PENALTIES, "logit_bias": {0: 0.4}, "min_tokens": 1}, {}),
    "at T = 0 and at 0.6": _asked(PENALTIES, temperature=(0.0, 0.6)),
}
FILTERS: dict[str, dict[str, Any]] = {  # of three ids, so that two are left
    "top-k": _asked({"top_k": 2, **PENALTIES}, {}),
    "top-p": _asked({"top_p": 0.75, **PENALTIES}, {"top_p": 0.8}),
    "min-p": _asked({"min_p": 0.6, **PENALTIES}, {"min_p": 0.4}),
}


def _error(toy: Toy, variant: Variant, tally: Tally | None = None) -> float:
    return float((emitted_law(toy, variant, START, tally) - target_joint(toy, START)).abs().max())


def _cases() -> list[Any]:
    quick = {("static", "all, and nothing"), ("lag, linear", "repetition"), ("lag-budget, table", "frequency")}
    quick |= {("adaptive, linear", "bans"), ("adaptive, table", "presence"), ("off", "bias")}
    return [
        pytest.param(*case, id="-".join(case), marks=[] if case in quick else [pytest.mark.slow])
        for case in product(MODES, WISHES)
    ]


def _check(toy: Toy, mode: str) -> None:
    variant, tally = MODES[mode][0], Tally()
    assert _error(toy, variant, tally) < EXACT
    if mode != "off":
        assert tally.accepted > 0
        assert tally.rejected > 0
    if mode not in ("off", "static"):
        assert tally.pruned > 0, "inconclusive: every draft was verified"


@pytest.mark.parametrize(("mode", "wish"), _cases())
def test_every_mode_emits_the_law_of_plain_decoding(mode: str, wish: str) -> None:
    _check(replace(TWO, **WISHES[wish]), mode)


@pytest.mark.slow
@pytest.mark.parametrize("wish", WISHES)
def test_greedy_drafts(wish: str) -> None:
    _check(replace(TWO, sample_drafts=False, **WISHES[wish]), "static")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wish", ["all, and nothing", *FILTERS])
def test_three_ids(wish: str) -> None:
    _check(replace(THREE, **{**WISHES, **FILTERS}[wish]), "static")


# ---------------------------------------------------------------------------------------------------------- faults


@dataclass(frozen=True, eq=False)
class _Faulty(Toy):
    """Rows that see something else than the drafts before them."""

    sees: str = ""

    def rows(self, sequences: tuple[Sequence, Sequence], context: Tensor) -> Tensor:
        num_drafts = 0 if self.sees == "no drafts" else context.shape[1] - 1
        made = enumeration.Histories

        def lying(*fields: Any) -> Any:
            return made(*fields[:-1], torch.full_like(fields[-1], num_drafts))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(enumeration, "Histories", lying)
            return super().rows(sequences, context)


@pytest.mark.parametrize("wish", ["repetition", "frequency", "presence", "bans"])
@pytest.mark.parametrize("sees", ["no drafts", "all drafts"])
def test_rows_that_see_other_drafts_are_noticed(sees: str, wish: str) -> None:
    toy = _Faulty(**{**{name: getattr(TWO, name) for name in ("target", "drafter", "head")}, **WISHES[wish]}, sees=sees)
    assert _error(toy, MODES["static"][0]) > VISIBLE
