"""How good a drafter is: sets of prompts answered on the real engine, beside plain decoding and n-gram look-up.

Two kinds of passes. Timed waves: all prompts of a set, the cases (off, ngram, the drafter in mode static) taking turns;
they give the speed. One trace per drafter over all temperatures and sets: it gives acceptance and, replayed as an engine
in service would have predicted it, calibration. What is learned on line carries over from set to set, as it does there.
Called by `slipstream evaluate`; the figures are made by `scores`.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.config import SamplingParams
from slipstream.decide.calibration import Calibration, find_calibration
from slipstream.lab import machine
from slipstream.lab.evaluate_options import OFF, EvaluateOptions
from slipstream.lab.measure import load, request_params, run_wave, sampling_facts, sizes, warm_up
from slipstream.lab.scores import POOLED, Cell, Steps, score_row
from slipstream.lab.traces import DraftTrace, collect_trace, foretell
from slipstream.lab.waves import Wave
from slipstream.llm import LLM, Completion
from slipstream.load import Models
from slipstream.models.headers import weights_digest
from slipstream.prompts import Messages, read_prompts, user

log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Prompts of one set at one temperature."""

    prompts: str
    temperature: float
    conversations: list[Messages]
    params: list[SamplingParams]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traced:
    """A drafter's trace over all groups, one after the other."""

    num_drafts: int  # S
    completions: tuple[Completion, ...]
    steps: Steps
    request_np: NDArray[np.int64]  # [n] the completion that each step belongs to


def run(options: EvaluateOptions, say: Say) -> dict[str, Any]:
    """The report that `--json` prints; `say` gets one line per thing done."""
    groups = groups_of(options)
    models = load(options.model, options.draft, options.engine, options.speculative)
    check(options, models, groups)
    traced = {drafter: trace(options, models, drafter, groups, say) for drafter in options.drafters}
    waves = time_groups(options, models, groups, say)
    cells = {
        name: [cell_of(traced.get(name), groups, index, waves.get((name, index), ())) for index in range(len(groups))]
        for name in dict.fromkeys([*options.timed, *options.drafters])
    }
    return {
        **machine.provenance(models.device),
        "model": options.model,
        "draft": options.draft,
        "conditions": conditions(options, models),
        "rows": rows_of(options, groups, cells, {name: found.num_drafts for name, found in traced.items()}),
    }


def check(options: EvaluateOptions, models: Models, groups: Sequence[Group]) -> None:
    """What would only come out when everything is traced: a bad calibration file, more drafts than a drafter makes."""
    for drafter in options.drafters:
        sized = {**_sizes(options, models, groups), "max_num_seqs": 1}
        LLM(models, speculative=options.config_of(drafter), **sized)
    path = calibration_file(options, models, options.draft)
    if path is not None:
        weights = None if models.drafter_path is None else weights_digest(models.drafter_path)
        if old := Calibration.load(path).of_other_weights(weights):
            names = ", ".join(map(" ".join, old))
            log.warning(
                "calibration %s: %s of other weights of the drafter; run slipstream calibrate again", path, names
            )


def groups_of(options: EvaluateOptions) -> list[Group]:
    """Temperature by temperature, so that a request is mostly served beside others of its class."""
    found = {
        name: [user(prompt) for prompt in read_prompts(path, limit=options.limit)]
        for name, path in zip(options.set_names, options.sets, strict=True)
    }
    return [
        Group(
            prompts=name,
            temperature=temperature,
            conversations=conversations,
            params=request_params(dataclasses.replace(options.sampling, temperature=temperature), len(conversations)),
        )
        for temperature in options.temperatures
        for name, conversations in found.items()
    ]


# --------------------------------------------------------------------------------------------------------------- passes


def trace(options: EvaluateOptions, models: Models, drafter: str, groups: Sequence[Group], say: Say) -> Traced:
    """All groups in one go, every draft verified and written down."""
    conversations = [messages for group in groups for messages in group.conversations]
    say(f"tracing {drafter}: {len(conversations)} requests")
    params = [each for group in groups for each in group.params]
    found = collect_trace(
        models, options.config_of(drafter), conversations, params, signal=_signal(options, drafter),
        concurrency=options.concurrency, **_sizes(options, models, groups),
    )  # fmt: skip
    return Traced(
        num_drafts=found.num_drafts,
        completions=found.completions,
        steps=steps_of(found, calibration_file(options, models, drafter)),
        request_np=found.request_np,
    )


def steps_of(found: DraftTrace, calibration: Path | None) -> Steps:
    """The trace with the survivals that an engine would have gone by."""
    scale_np = None if calibration is None else Calibration.load(calibration).scale_np(found.signal, found.num_drafts)
    foretold = foretell(found, scale_np)
    return Steps(
        signal=found.signal,
        widths_np=found.widths_np,
        accepted_np=found.accepted_np,
        survived_np=found.survived_np,
        known_np=found.known_np,
        survival_np=foretold.survival_np,
        lag_known_np=foretold.lag_known_np,
    )


def time_groups(
    options: EvaluateOptions, models: Models, groups: Sequence[Group], say: Say
) -> dict[tuple[str, int], tuple[Wave, ...]]:
    """(drafter, group) -> its waves. Within a group cases take turns wave by wave."""
    llms = {name: start(options, models, name, groups, say) for name in options.timed}
    waves: dict[tuple[str, int], tuple[Wave, ...]] = {}
    for index, group in enumerate(groups):
        for number in range(options.waves):
            for name, llm in llms.items():
                wave, _ = run_wave(llm, group.conversations, group.params)
                waves[name, index] = (*waves.get((name, index), ()), wave)
                turn = f"{group.prompts} at T = {group.temperature:g}, wave {number + 1}/{options.waves}"
                say(f"{turn}  {name}: {wave.tok_per_s:.1f} tok/s")
    return waves


def start(options: EvaluateOptions, models: Models, drafter: str, groups: Sequence[Group], say: Say) -> LLM:
    """An engine for one case; its first steps are not timed."""
    say(f"starting {drafter}")
    room = _sizes(options, models, groups)
    llm = LLM(models, speculative=options.config_of(drafter), max_num_seqs=options.concurrency, **room)
    return warm_up(llm, groups[0].conversations)


# ----------------------------------------------------------------------------------------------------------------- rows


def cell_of(traced: Traced | None, groups: Sequence[Group], index: int, waves: tuple[Wave, ...]) -> Cell:
    """One drafter's part of a group."""
    if traced is None:
        return Cell(answers=waves[0].answers, steps=None, waves=waves)
    first = sum(len(group.conversations) for group in groups[:index])
    end = first + len(groups[index].conversations)
    chosen = (traced.request_np >= first) & (traced.request_np < end)
    return Cell(answers=traced.completions[first:end], steps=traced.steps.rows(chosen), waves=waves)


def rows_of(
    options: EvaluateOptions,
    groups: Sequence[Group],
    cells: Mapping[str, Sequence[Cell]],
    num_drafts: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Set by set within a temperature, and last all sets together where there are several."""
    rows = []
    for temperature in options.temperatures:
        indices = [index for index, group in enumerate(groups) if group.temperature == temperature]
        parts = [(groups[index].prompts, [index]) for index in indices]
        for prompts, together in [*parts, *([(POOLED, indices)] if len(indices) > 1 else [])]:
            joined = {name: Cell.join([of_group[index] for index in together]) for name, of_group in cells.items()}
            rows += [
                score_row(
                    prompts=prompts, temperature=temperature, drafter=name, num_drafts=num_drafts.get(name), cell=cell,
                    plain=joined.get(OFF), same_text=options.same_text(temperature),
                )
                for name, cell in joined.items()
            ]  # fmt: skip
    return rows


def conditions(options: EvaluateOptions, models: Models) -> dict[str, Any]:
    """What the figures hold for."""
    files = {drafter: calibration_file(options, models, drafter) for drafter in options.drafters}
    return {
        "dtype": str(models.dtype).removeprefix("torch."),
        "acceptance": options.speculative.get("acceptance", "coupled"),
        "concurrency": options.concurrency,
        "waves": options.waves,
        "limit": options.limit,
        "prompts": {name: str(path or "built in") for name, path in zip(options.set_names, options.sets, strict=True)},
        # Each cell has its own temperature.
        "sampling": {name: v for name, v in sampling_facts(options.sampling).items() if name != "temperature"},
        "calibration_file": {drafter: file and str(file) for drafter, file in files.items()},
    }


def calibration_file(options: EvaluateOptions, models: Models, drafter: str) -> Path | None:
    """The file that an engine would use for the drafter under test; n-gram look-up beside it has none."""
    if drafter != options.draft:
        return None
    return find_calibration(options.speculative.get("calibration"), models.drafter_path)


def _signal(options: EvaluateOptions, drafter: str) -> Any:
    """Raw confidence of the trace; n-gram look-up has one only."""
    return options.speculative.get("confidence_signal", "auto") if drafter == options.draft else "auto"


def _sizes(options: EvaluateOptions, models: Models, groups: Sequence[Group]) -> dict[str, Any]:
    conversations = [messages for group in groups for messages in group.conversations]
    return sizes(models, conversations, options.sampling.max_tokens, options.engine)
