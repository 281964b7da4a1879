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
from rich import box
from rich.table import Table

from slipstream.config import NGRAM, Signal, SpeculativeConfig
from slipstream.decide.survival import CLASSES, Calibration
from slipstream.errors import ConfigError
from slipstream.lab import machine
from slipstream.lab.calibrate_options import CalibrateOptions
from slipstream.lab.plots import ReliabilityPanel, reliability_plot, require_matplotlib
from slipstream.lab.quality import Quality, quality, reliability
from slipstream.lab.scaling import fit_temperatures
from slipstream.lab.traces import Bools, DraftTrace, Floats, collect_trace, replay
from slipstream.llm import LLM
from slipstream.load import Models, load_models
from slipstream.prompts import Messages, read_prompts, user

BUILT_IN = "calibration_sample"
FILE = "calibration.json"
LEAST_REQUESTS = 8  # below it, half of them say next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One entry of the file and how good it is. The figures are of requests that the fit did not see."""

    signal: Signal
    name: str  # greedy, sampled
    temperature: float  # of serving
    temperatures: tuple[float, ...]  # fitted on all requests
    requests: int
    steps: int
    raw: Quality  # the signal as the drafter says it
    file: Quality  # with the temperatures of the other half
    fresh: Quality  # as served: corrected by outcomes as well
    lagged_raw: Quality  # foretold by the step before, without temperatures
    lagged: Quality  # with them
    panel: ReliabilityPanel


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateResult:
    fits: tuple[Fit, ...]
    path: Path
    report: dict[str, Any]  # what `--json` prints


def run(options: CalibrateOptions, say: Callable[[str], None]) -> CalibrateResult:
    """Measure, fit, write the file (and the plot); `say` gets one line per thing done."""
    if options.plot is not None:
        require_matplotlib(options.plot)
    conversations = read_conversations(options)
    models = load_models(
        options.model, options.draft, dtype=options.dtype, device=options.device, layout=options.draft_layout
    )
    path = options.output or _beside(models)
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
    about = {"prompts": prompt_names(options), **_serving(options, speculative)}
    report = {**provenance(options, models), **about, "path": str(path), "fits": [as_dict(one) for one in fits]}
    calibration_of(fits, about).save(path)
    if options.plot is not None:
        reliability_plot(options.plot, [one.panel for one in fits])
    return CalibrateResult(fits=tuple(fits), path=path, report=report)


def read_conversations(options: CalibrateOptions) -> list[Messages]:
    files = options.prompts or (Path(str(resources.files("slipstream") / f"assets/prompts/{BUILT_IN}.jsonl")),)
    found = [user(text) for path in files for text in read_prompts(path, limit=options.limit)]
    if len(found) < LEAST_REQUESTS:
        raise ConfigError(
            f"prompts: {len(found)} are too few to fit on one half and judge by the other; give {LEAST_REQUESTS} or more"
        )
    return found


def prompt_names(options: CalibrateOptions) -> list[str]:
    return [path.stem for path in options.prompts] or [BUILT_IN]


def _beside(models: Models) -> Path:
    assert models.drafter_path is not None  # ngram, which has none, is refused without an output
    return models.drafter_path / FILE


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
    scale_np = _scale_of(trace.rows(~held_out))
    raw = replay(trace, learns=False).fresh_np
    file = replay(trace, scale_np, learns=False).fresh_np
    # Learning goes on over all requests, as it does in service: a step is foretold before it teaches.
    without, served = replay(trace), replay(trace, scale_np)
    own = trace.known_np & held_out[:, None]
    lagged = own & served.lag_known_np[:, None]

    def judged(survival_np: Floats, counts_np: Bools) -> Quality:
        return quality(survival_np, trace.survived_np, counts_np)

    name = CLASSES[temperature > 0]
    series = {"as drafted": raw, "calibrated": file, "lagged": served.lagged_np}
    return Fit(
        signal=trace.signal,
        name=name,
        temperature=temperature,
        temperatures=_temperatures(trace),
        requests=len(trace.completions),
        steps=len(trace),
        raw=judged(raw, own),
        file=judged(file, own),
        fresh=judged(served.fresh_np, own),
        lagged_raw=judged(without.lagged_np, lagged),
        lagged=judged(served.lagged_np, lagged),
        panel=ReliabilityPanel(
            title=f"{trace.signal}, {name}",
            series=tuple(
                (label, reliability(values[where], trace.survived_np[where]))
                for label, values in series.items()
                for where in [lagged if label == "lagged" else own]
            ),
        ),
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


def calibration_of(fits: Sequence[Fit], about: Mapping[str, Any]) -> Calibration:
    """The file: temperatures, and for its readers where they come from and what they brought."""
    return Calibration(
        temperatures={(one.signal, one.name): one.temperatures for one in fits},
        about={(one.signal, one.name): {**_brought(one), **about} for one in fits},
    )


def _brought(one: Fit) -> dict[str, Any]:
    return {
        "temperature": one.temperature,
        "requests": one.requests,
        "num_samples": one.steps,
        "ece_before": _short(one.raw.ece),
        "ece_after": _short(one.file.ece),
        "ece_noise": _short(one.file.ece_noise),
        "auroc_before": _short(one.raw.auroc),
        "auroc_after": _short(one.file.auroc),
        "brier_before": _short(one.raw.brier),
        "brier_after": _short(one.file.brier),
        "lagged_ece_before": _short(one.lagged_raw.ece),
        "lagged_ece_after": _short(one.lagged.ece),
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _serving(options: CalibrateOptions, speculative: SpeculativeConfig) -> dict[str, Any]:
    """What the figures hold for."""
    return {
        "top_p": options.top_p,
        "acceptance": options.acceptance,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "max_tokens": options.max_tokens,
    }


def provenance(options: CalibrateOptions, models: Models) -> dict[str, Any]:
    return {
        "git": machine.git_commit(),
        "versions": machine.versions(),
        "device": machine.device_facts(models.device),
        "dtype": str(models.dtype).removeprefix("torch."),
        "model": options.model,
        "draft": options.draft,
        "seed": options.seed,
        "concurrency": options.concurrency,
    }


def as_dict(one: Fit) -> dict[str, Any]:
    plain = {field.name: getattr(one, field.name) for field in dataclasses.fields(one) if field.name != "panel"}
    reliability_of = {label: [dataclasses.asdict(each) for each in table] for label, table in one.panel.series}
    return {
        name: dataclasses.asdict(value) if isinstance(value, Quality) else value for name, value in plain.items()
    } | {"reliability": reliability_of}


def summary(one: Fit) -> str:
    temperatures = " ".join(f"{value:.2f}" for value in one.temperatures)
    return f"{one.signal}, {one.name}: {one.steps} steps of {one.requests} requests; temperatures {temperatures}"


def fits_table(fits: Sequence[Fit]) -> Table:
    """Held-out figures by signal and class; the columns are those of `evaluate`."""
    title = "expected calibration error of survival, on requests that were not fitted on"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("signal", "class", "steps", "raw", "file", "fresh", "lagged", "noise", "AUROC", "with file"):
        table.add_column(column, justify="left" if column in ("signal", "class") else "right")
    for one in fits:
        table.add_row(
            one.signal, one.name, str(one.steps),
            *(_percent(part.ece) for part in (one.raw, one.file, one.fresh, one.lagged)),
            _percent(one.file.ece_noise), _decimal(one.raw.auroc), _decimal(one.file.auroc),
        )  # fmt: skip
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
