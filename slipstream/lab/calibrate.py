"""`slipstream calibrate`: temperatures of a drafter's confidence, fitted on traces of its own drafts at full width.

For each class of requests (greedy, sampled) and each signal, the prompts are answered once with every draft verified.
Half of the requests fit, the other half say how good the fit is, and what is written is then fitted on all. Called by
the command; serving only reads the file that comes out (`decide/survival.Calibration`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from slipstream.config import CALIBRATION_FILE, NGRAM, Signal, SpeculativeConfig
from slipstream.decide.calibration import Calibration
from slipstream.decide.survival import CLASSES
from slipstream.errors import ConfigError
from slipstream.files import check_writable
from slipstream.lab import machine
from slipstream.lab.calibrate_options import CalibrateOptions
from slipstream.lab.plots import ReliabilityPanel, reliability_plot, require_matplotlib
from slipstream.lab.quality import Quality, quality, reliability
from slipstream.lab.scaling import fit_temperatures
from slipstream.lab.tables import new_table, shown
from slipstream.lab.traces import Bools, DraftTrace, Floats, collect_trace, foretell, replay
from slipstream.llm import LLM
from slipstream.load import Models, load_models
from slipstream.models.headers import weights_digest
from slipstream.models.locate import resolve_drafter
from slipstream.prompts import Messages, read_prompts, user

BUILT_IN = "calibration_sample"
LEAST_REQUESTS = 8  # below it, half of them say next to nothing
LEAST_STEPS = 32  # of each half, in which the first draft was verified; below it the prior alone would be written
DRAWN = ("raw", "file", "lagged")  # in the plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One entry of the file and how good it is. The figures are of requests that the fit did not see."""

    signal: Signal
    request_class: str  # greedy, sampled
    temperature: float  # of serving
    temperatures: tuple[float, ...]  # fitted on all requests
    requests: int
    steps: int
    held_out_steps: int  # those that the figures are of
    # raw, file (with the temperatures of the other half), fresh and lagged, as `evaluate` has them; and
    # lagged_without_file, foretold by the step before without any temperatures
    calibration: Mapping[str, Quality]
    panel: ReliabilityPanel

    @property
    def key(self) -> tuple[str, str]:
        return self.signal, self.request_class


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateResult:
    fits: tuple[Fit, ...]
    kept: tuple[tuple[str, str], ...]  # (signal, class) of what stood in the file and was not fitted anew
    path: Path
    report: dict[str, Any]  # what `--json` prints


def run(options: CalibrateOptions, say: Callable[[str], None]) -> CalibrateResult:
    """Measure, fit, write the file (and the plot); `say` gets one line per thing done."""
    if options.plot is not None:
        require_matplotlib(options.plot)
        check_writable(options.plot, "plot")
    conversations = read_conversations(options)
    path = options.output or resolve_drafter(options.draft) / CALIBRATION_FILE
    check_output(path)
    models = load_models(
        options.model, options.draft, dtype=options.dtype, device=options.device, layout=options.draft_layout
    )
    weights = None if models.drafter_path is None else weights_digest(models.drafter_path)
    speculative, signals = what_it_drafts(options, models)
    fits = []
    for temperature in options.temperature:
        for signal in signals:
            trace = collect_trace(
                models, speculative, conversations, options.params(temperature), signal=signal,
                concurrency=options.concurrency, seed=options.seed,
            )  # fmt: skip
            fits.append(fit(trace, temperature))
            say(summary(fits[-1]))
    conditions = conditions_of(options, models, speculative)
    kept = save(calibration_of(fits, conditions, weights), path)
    if old := Calibration.load(path).of_other_weights(weights):
        say(f"of other weights of the drafter, to be calibrated again: {', '.join(map(' '.join, old))}")
    if options.plot is not None:
        reliability_plot(options.plot, [one.panel for one in fits])
    report = report_of(options, models, conditions, path, kept, fits)
    return CalibrateResult(fits=tuple(fits), kept=kept, path=path, report=report)


def check_output(path: Path) -> None:
    """Before minutes are spent: the file can be written, and what is in it already can be read."""
    check_writable(path, "output", hint=", which an engine takes as `calibration`")
    if path.exists():
        Calibration.load(path)


def read_conversations(options: CalibrateOptions) -> list[Messages]:
    files = options.prompts or (Path(str(resources.files("slipstream") / f"assets/prompts/{BUILT_IN}.jsonl")),)
    found = [user(text) for path in files for text in read_prompts(path, limit=options.limit)]
    if len(found) < LEAST_REQUESTS:
        raise ConfigError(
            f"prompts: {len(found)} are too few to fit on one half and judge by the other; give {LEAST_REQUESTS} or more"
        )
    return found


def what_it_drafts(options: CalibrateOptions, models: Models) -> tuple[SpeculativeConfig, list[Signal]]:
    """All drafts that it makes, so that one file serves every S; and the signals that there are or were asked for."""
    drafter = LLM(models, speculative=options.speculative(), max_num_seqs=1).engine.drafter
    assert drafter is not None
    there: dict[Signal, bool] = {"head": drafter.has_confidence_head, "peak": options.draft != NGRAM}
    signals = list(options.signals) or [signal for signal, is_there in there.items() if is_there]
    return options.speculative(options.num_speculative_tokens or drafter.max_draft_tokens), signals


# --------------------------------------------------------------------------------------------------------------- one fit


def fit(trace: DraftTrace, temperature: float) -> Fit:
    """Temperatures from half of the requests, judged on the other half, then fitted on all."""
    held_out = half_of(len(trace.completions))[trace.request_np]
    _check_enough(trace, held_out)
    scale_np = _scale_of(trace.rows(~held_out))
    foretold = foretell(trace, scale_np)
    survival = {**foretold.survival_np, "lagged_without_file": replay(trace).lagged_np}
    own = trace.known_np & held_out[:, None]
    counts = {name: own & foretold.lag_known_np[:, None] if name.startswith("lagged") else own for name in survival}
    name = CLASSES[temperature > 0]
    return Fit(
        signal=trace.signal,
        request_class=name,
        temperature=temperature,
        temperatures=_temperatures(trace),
        requests=len(trace.completions),
        steps=len(trace),
        held_out_steps=int(held_out.sum()),
        calibration={form: quality(survival[form], trace.survived_np, counts[form]) for form in survival},
        panel=ReliabilityPanel(
            title=f"{trace.signal}, {name}",
            series=tuple(
                (form, reliability(survival[form][counts[form]], trace.survived_np[counts[form]])) for form in DRAWN
            ),
        ),
    )


def _check_enough(trace: DraftTrace, held_out: Bools) -> None:
    of_half = [int(trace.known_np[half, 0].sum()) for half in (~held_out, held_out)]
    if min(of_half) < LEAST_STEPS:
        raise ConfigError(
            f"prompts: their answers took {of_half[0]} steps with drafts in the half that is fitted on and {of_half[1]} in "
            f"the other, and {LEAST_STEPS} are the least of each; give more prompts, or raise max_tokens"
        )


def half_of(num_requests: int) -> Bools:
    """[requests] True for half of them. Drawn, for files often have their kinds of prompts in a regular order."""
    order = np.random.default_rng(0).permutation(num_requests)
    return order < num_requests // 2


def _temperatures(trace: DraftTrace) -> tuple[float, ...]:
    return fit_temperatures(trace.signal_np, trace.accepted_np, trace.widths_np)


def _scale_of(trace: DraftTrace) -> Floats:
    """[2, S], the same for both classes: a trace has one."""
    return np.tile(1 / np.array(_temperatures(trace)), (2, 1))


# ------------------------------------------------------------------------------------------------------- what comes out


def calibration_of(fits: Sequence[Fit], conditions: Mapping[str, Any], weights: str | None) -> Calibration:
    """The file: temperatures, and for its readers where they come from and what they brought."""
    return Calibration(
        temperatures={one.key: one.temperatures for one in fits},
        about={one.key: {**_brought(one), **_in_short(conditions)} for one in fits},
        weights={one.key: weights for one in fits} if weights is not None else {},
    )


def _brought(one: Fit) -> dict[str, Any]:
    found = one.calibration
    errors = {f"ece_{name}": of.ece for name, of in found.items()} | {"ece_noise": found["file"].ece_noise}
    order = {f"auroc_{name}": found[name].auroc for name in ("raw", "file")}
    squares = {f"brier_{name}": found[name].brier for name in ("raw", "file")}
    return {
        "temperature": one.temperature,
        "requests": one.requests,
        "steps": one.steps,
        "held_out_steps": one.held_out_steps,
        **{name: None if value is None else round(value, 5) for name, value in (errors | order | squares).items()},
    }


def _in_short(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Those that a reader of the file may want; paths are of one machine."""
    kept = {name: conditions[name] for name in ("acceptance", "num_speculative_tokens")}
    served = {name: conditions["sampling"][name] for name in ("max_tokens", "top_p")}
    return {"prompts": list(conditions["prompts"]), **kept, **served}


def save(fitted: Calibration, path: Path) -> tuple[tuple[str, str], ...]:
    """Write what was fitted over the same entries of the file; the other ones stay, and are returned."""
    before = Calibration.load(path) if path.exists() else Calibration(temperatures={})
    kept = tuple(key for key in before.temperatures if key not in fitted.temperatures)

    Calibration(
        temperatures={key: before.temperatures[key] for key in kept} | fitted.temperatures,
        about={key: before.about[key] for key in kept if key in before.about} | fitted.about,
        weights={key: before.weights[key] for key in kept if key in before.weights} | fitted.weights,
    ).save(path)
    return kept


def conditions_of(options: CalibrateOptions, models: Models, speculative: SpeculativeConfig) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "dtype": str(models.dtype).removeprefix("torch."),
        "acceptance": options.acceptance,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "concurrency": options.concurrency,
        "limit": options.limit,
        "prompts": {path.stem: str(path) for path in options.prompts} or {BUILT_IN: "built in"},
        "sampling": {"max_tokens": options.max_tokens, "top_p": options.top_p, "seed": options.seed},
    }


def report_of(
    options: CalibrateOptions, models: Models, conditions: Mapping[str, Any], path: Path,
    kept: Sequence[tuple[str, str]], fits: Sequence[Fit],
) -> dict[str, Any]:  # fmt: skip
    return {
        **machine.provenance(models.device),
        "model": options.model,
        "draft": options.draft,
        "conditions": dict(conditions),
        "calibration_file": str(path),
        "kept": [f"{signal} {name}" for signal, name in kept],
        "fits": [as_dict(one) for one in fits],
    }


def as_dict(one: Fit) -> dict[str, Any]:
    return {
        "signal": one.signal,
        "class": one.request_class,
        "temperature": one.temperature,
        "temperatures": list(one.temperatures),
        "requests": one.requests,
        "steps": one.steps,
        "held_out_steps": one.held_out_steps,
        "calibration": {name: dataclasses.asdict(of) for name, of in one.calibration.items()},
        "reliability": {name: [dataclasses.asdict(each) for each in table] for name, table in one.panel.series},
    }


def summary(one: Fit) -> str:
    temperatures = " ".join(f"{value:.2f}" for value in one.temperatures)
    return (
        f"{one.signal}, {one.request_class}: {one.steps} steps of {one.requests} requests; temperatures {temperatures}"
    )


def fits_table(fits: Sequence[Fit]) -> Table:
    """Held-out figures by signal and class; the columns are those of `evaluate`."""
    title = "calibration error (ECE) and order (AUROC) of survival, on requests that were not fitted on"
    heads = (
        "steps",
        "held\nout",
        "ECE, %\nraw",
        "\nfile",
        "\nfresh",
        "\nlagged",
        "\nnoise",
        "AUROC\nraw",
        "AUROC\nfile",
    )
    table = new_table(title, ("signal", "class", *heads), ("signal", "class"))
    for one in fits:
        found = one.calibration
        table.add_row(
            one.signal, one.request_class, str(one.steps), str(one.held_out_steps),
            *(shown(found[name].ece, ".1f", 100) for name in ("raw", "file", "fresh", "lagged")),
            shown(found["file"].ece_noise, ".1f", 100), *(shown(found[name].auroc, ".3f") for name in ("raw", "file")),
        )  # fmt: skip
    return table
