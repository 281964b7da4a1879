"""Who competes in a simulation: the engine's own policies, some that no engine has, and a user's from a file.

    off, static, static:3, static:all     plain decoding; S drafts, 3 drafts, or 1, 2, ... S in turn, all verified
    fixed:3, fixed:all                    S drafts of which 3 are verified, or 0, 1, ... S in turn
    adaptive, lag, lag-budget             the objects that the engine would have, from `make_policy`
    lag-2, lag-3                          lag by the confidence of two or three decode steps ago
    lag-raw, lag-2-raw, lag-3-raw         the same, with no map from what was said then to what is to be expected now
    oracle                                knows how many drafts will be accepted, and asks the same controller
    policies.py:Mine                      called as Mine(num_drafts=S, cost=CostModel, signal="head"); see `Policy`
    all                                   all of these but `fixed` and files

Called by `simulate`; knows neither traces nor loads.
"""

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slipstream.config import Signal, SpeculativeConfig
from slipstream.decide import controller
from slipstream.decide.calibration import Calibration
from slipstream.decide.confidence import Confidence, ConfidenceStore
from slipstream.decide.controller import AnyInts, Problem
from slipstream.decide.cost import CostModel, CostProfile
from slipstream.decide.going_rate import GoingRate
from slipstream.decide.make import make_policy
from slipstream.decide.policy import Adaptive, FullWidth, Policy, expected_ms, step_cost
from slipstream.decide.survival import Classes, SurvivalModel
from slipstream.errors import ConfigError
from slipstream.lab.variants import FixedWidth
from slipstream.plan import Decision, StepPlan, StepResult

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

AGED = tuple(f"lag{age}{raw}" for raw in ("", "-raw") for age in ("", "-2", "-3"))
BY_SIGNAL = ("adaptive", *AGED, "lag-budget")  # run once for each signal
ALL = ("off", "static:all", *BY_SIGNAL, "oracle")
MEMBERS = ("waits_for", "signal", "calibration_np", "draft_length", "observe", "decide", "learn", "times", "timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a policy is made for."""

    num_drafts: int  # S
    signal: Signal
    concurrency: int  # slots
    profile: CostProfile
    min_gain: float = 0.0
    calibration: Path | None = None

    def cost(self) -> CostModel:
        """A new one, which corrects itself."""
        return self.profile.model()


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A policy that is yet to be made."""

    name: str
    num_drafts: int  # the engine's S: `static:3` has one of its own
    signal: Signal | None  # None: it does not matter
    make: Callable[[Setting], Policy]


def contestants(names: Sequence[str], num_drafts: int, signals: Sequence[Signal]) -> list[Contestant]:
    """Those that `names` ask for, in that order, each once. ConfigError names one that does not exist."""
    found: dict[tuple[str, Signal | None], Contestant] = {}
    for name in names:
        for part in ALL if name == "all" else (name,):
            for contestant in _named(part, num_drafts, signals):
                found.setdefault((contestant.name, contestant.signal), contestant)
    return list(found.values())


def _named(name: str, num_drafts: int, signals: Sequence[Signal]) -> list[Contestant]:
    kind, _, text = name.partition(":")
    if kind in ("static", "fixed") and (kind == "static" or text):
        return [_full_or_fixed(kind, width, num_drafts) for width in _widths(name, kind, text, num_drafts)]
    if name == "off":
        return [Contestant(name=name, num_drafts=0, signal=None, make=lambda _: FullWidth(0))]
    if name == "oracle":
        return [Contestant(name=name, num_drafts=num_drafts, signal=None, make=_oracle)]
    if ".py:" in name:
        make: Callable[[Setting], Policy] = _load(name)
    elif name in ("adaptive", "lag", "lag-budget"):
        make = _of_engine(name)
    elif name in AGED:
        make = _aged(name)
    else:
        raise ConfigError(
            f"policies holds {name!r}; choose among {', '.join(ALL)}, static, static:N, fixed:N, fixed:all, file.py:Name "
            "and all"
        )
    return [Contestant(name=name, num_drafts=num_drafts, signal=signal, make=make) for signal in signals]


def _widths(name: str, kind: str, text: str, num_drafts: int) -> Sequence[int]:
    least = 1 if kind == "static" else 0
    if text == "all":
        return range(least, num_drafts + 1)
    if not text and name == kind:
        return (num_drafts,)
    if not text.isdecimal() or not least <= int(text) <= num_drafts:
        raise ConfigError(f"policies holds {name!r}; widths are whole numbers from {least} to {num_drafts}, or all")
    return (int(text),)


def _full_or_fixed(kind: str, width: int, num_drafts: int) -> Contestant:
    name = f"{kind}:{width}"
    if kind == "static":
        return Contestant(name=name, num_drafts=width, signal=None, make=lambda _: FullWidth(width))
    return Contestant(name=name, num_drafts=num_drafts, signal=None, make=lambda _: FixedWidth(num_drafts, width))


def _of_engine(mode: str) -> Callable[[Setting], Policy]:
    def make(setting: Setting) -> Policy:
        gain = 0.0 if mode == "lag-budget" else setting.min_gain
        config = SpeculativeConfig.for_mode(
            mode, draft_model="trace", confidence_signal=setting.signal, adaptive_speculative_min_gain=gain
        )
        return make_policy(
            config, num_drafts=setting.num_drafts, has_head=True, cost=setting.cost(), calibration=setting.calibration
        )[0]

    return make


# ------------------------------------------------------------------------------------------------------ no engine's own


def _aged(name: str) -> Callable[[Setting], Policy]:
    found = re.fullmatch(r"lag(?:-(\d))?(-raw)?", name)
    assert found, name
    age, kind = int(found[1] or 1), Unmapped if found[2] else SurvivalModel

    def make(setting: Setting) -> Policy:
        scale = None
        if setting.calibration is not None:
            scale = Calibration.load(setting.calibration).scale_np(setting.signal, setting.num_drafts)
        policy = Adaptive(
            num_drafts=setting.num_drafts, waits_for="lagged", budget=False, signal=setting.signal,
            cost=setting.cost(), survival=kind(setting.num_drafts, scale), min_gain=setting.min_gain,
        )  # fmt: skip
        policy.store = AgedStore(setting.num_drafts, age, setting.concurrency)
        return policy

    return make


class Unmapped(SurvivalModel):
    """What was said of a former draft is taken for what is to be expected of this one."""

    def predict(self, lagged_np: Floats, class_np: Classes) -> Floats:
        return np.minimum.accumulate(lagged_np, axis=1)


class AgedStore(ConfidenceStore):
    """Shows what was said `age` decode steps ago, and nothing of a request that has not decoded so often."""

    def __init__(self, num_drafts: int, age: int, num_slots: int) -> None:
        super().__init__(num_drafts)
        self._age = age
        # By decode step modulo age, and slot; the owner's generation, uid, decode step and the length of its draft.
        self._rows_np = np.zeros((age, num_slots, num_drafts))
        self._owners_np = np.full((4, age, num_slots), -1, dtype=np.int64)

    def put(self, plan: StepPlan, values_np: Floats) -> None:
        num_decode, length = values_np.shape
        slots, steps = plan.slots_np[:num_decode], plan.decode_steps_np[:num_decode]
        at = steps % self._age
        self._rows_np[at, slots, :length] = values_np
        lengths = np.full(num_decode, length)
        self._owners_np[:, at, slots] = plan.generations_np[:num_decode], plan.uids_np[:num_decode], steps, lengths

    def lookup(self, plan: StepPlan) -> Confidence:
        count = plan.num_decode
        slots, wanted = plan.slots_np[:count], plan.decode_steps_np[:count] - self._age
        at = wanted % self._age
        generation, uid, step, length = self._owners_np[:, at, slots]
        own = (generation == plan.generations_np[:count]) & (uid == plan.uids_np[:count])
        known = own & (step == wanted)
        lengths = length * known
        alike = bool(known.all()) and not np.count_nonzero(lengths != lengths[:1])
        return Confidence(
            self._rows_np[at, slots],
            lengths,
            known,
            own & (step < wanted),
            int(lengths[0]) if alike and count else None,
        )


def _oracle(setting: Setting) -> Policy:
    profile = setting.profile
    return Oracle(setting.num_drafts, CostModel(profile.step, profile.draft, mixed=profile.mixed, corrects=False))


class Oracle(FullWidth):
    """Is told before each step how many drafts would be accepted: survival 1 up to there, any draft length, true prices.

    It is the same controller that decides, by the rate of the step and of the last ones together, as the engine's
    policies do; so it bounds them, up to what steps do to one another.
    """

    def __init__(self, num_drafts: int, cost: CostModel) -> None:
        super().__init__(num_drafts)
        self._cost = cost
        self._going_rate = GoingRate()
        self._runs_np: Ints = np.zeros(0, dtype=np.int64)  # [D]

    def foresee(self, runs_np: AnyInts) -> None:
        """[D] of the step that is decided next."""
        self._runs_np = runs_np.astype(np.int64)

    def draft_length(self, plan: StepPlan) -> int:
        if not plan.num_decode:
            return 0
        survival, caps = self._survival(plan, self.num_drafts), self._caps(plan, self.num_drafts)
        past_tokens, past_ms = self._going_rate.past(plan.num_decode)
        rates = controller.best_rate_by_length(
            controller.rank_candidates(survival, caps),
            plan.context_upper_bound_np.astype(np.int64),
            plan.num_given_np,
            plan.num_emitting + past_tokens,
            step_cost(plan, self._cost),
            {d: past_ms + self._cost.draft_ms(d, plan.num_decode) for d in range(int(caps.max()) + 1)},
        )
        return max(rates, key=rates.__getitem__)  # of equals the shortest

    def decide(self, plan: StepPlan) -> Decision:
        caps = self._caps(plan, plan.draft_length)
        widths = self._widths(plan, caps) if plan.draft_length else caps
        decision = Decision(widths_np=widths, budget=None, caps_np=caps)
        if plan.num_decode and self._going_rate.counts(plan.step):
            self._going_rate.price(plan, expected_ms(plan, decision, self._cost))
        return decision

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        if plan.num_decode:
            self._going_rate.count(plan, result)

    def _widths(self, plan: StepPlan, caps: NDArray[np.int32]) -> NDArray[np.int32]:
        step, length = step_cost(plan, self._cost), plan.draft_length
        past_tokens, past_ms = self._going_rate.past(plan.num_decode)
        widths = controller.decide_widths(
            Problem(
                rule=controller.rule_for(step, budget=False, causal=False),
                survival_np=self._survival(plan, length),
                unknown_np=np.zeros(plan.num_sequences, dtype=np.bool_),
                caps_np=caps,
                kv_np=plan.context_upper_bound_np.astype(np.int64),
                given_np=plan.num_given_np,
                num_emitting=plan.num_emitting + past_tokens,
                cost=step,
                draft_ms=past_ms + self._cost.draft_ms(length, plan.num_decode),
            )
        )
        return widths.astype(np.int32)

    def _caps(self, plan: StepPlan, length: int) -> NDArray[np.int32]:
        """[B] drafts that would be accepted."""
        caps = np.minimum(plan.caps_np, np.int32(length))
        caps[: plan.num_decode] = np.minimum(caps[: plan.num_decode], self._runs_np)
        return caps

    def _survival(self, plan: StepPlan, length: int) -> Floats:
        """[B, length]"""
        return (np.arange(length) < self._caps(plan, length)[:, None]).astype(np.float64)


# ----------------------------------------------------------------------------------------------------------- a user's own


def _load(name: str) -> Callable[[Setting], Policy]:
    """The class or function that `file.py:Name` means; its file is executed."""
    file, _, attribute = name.rpartition(":")
    path = Path(file)
    spec = importlib.util.spec_from_file_location(f"slipstream_policy_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"policies: there is no file {file}; give file.py:Name")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    factory: Any = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(f"policies: {file} has no class or function {attribute!r}")

    def make(setting: Setting) -> Policy:
        policy: Policy = factory(num_drafts=setting.num_drafts, cost=setting.cost(), signal=setting.signal)
        if missing := [member for member in MEMBERS if not hasattr(policy, member)]:
            raise ConfigError(f"policies: {name} lacks {', '.join(missing)}; see slipstream.decide.policy.Policy")
        return policy

    return make
