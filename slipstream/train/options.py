"""What a training run is asked to do, as values. No torch here: the command line reads these fields and their docs.

`TrainOptions` is what a user sets; `Recipe` is how the training is done, with defaults that worked. A run is a function
of both.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from slipstream.errors import ConfigError

Label = Literal["data", "teacher"]
RowWeights = Literal["exponential", "dpace"]
Normaliser = Literal["weights", "rows"]
Method = Literal["muon", "adamw"]
Schedule = Literal["linear", "cosine"]
Anchors = Literal["next_scored", "scored"]

MIN_ANSWER_TOKENS = 4  # shorter answers teach nothing


def _choose(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ConfigError(f"{name} is {value!r}; choose {' or '.join(get_args(choices))}")


def _default(cls: type[Any], name: str) -> object:
    return next(f.default for f in dataclasses.fields(cls) if f.name == name)


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers from `least` to `most`, themselves among them unless `above` or `below`."""

    least: float = 0
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        lower = value > self.least if self.above else value >= self.least
        upper = value < self.most if self.below else value <= self.most
        return -math.inf < value < math.inf and lower and upper

    def __str__(self) -> str:
        upper = f" and {'below' if self.below else 'at most'} {self.most:.12g}" if math.isfinite(self.most) else ""
        return f"{'above' if self.above else 'at least'} {self.least:g}{upper}"


SHARE, FACTOR, COUNT, POSITIVE = Range(0, 1), Range(0, 1, below=True), Range(1), Range(0, above=True)


def _check_ranges(options: object, ranges: Mapping[str, Range], table: str = "") -> None:
    """ConfigError that names the first number of `options`, or the list that holds it, which is out of its range."""
    for name, allowed in ranges.items():
        value = getattr(options, name)
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            if number not in allowed:
                shown = list(value) if isinstance(value, tuple) else value
                what = "every number in it" if isinstance(value, tuple) else "it"
                finite = "" if -math.inf < number < math.inf else "finite and "
                raise ConfigError(f"{table}{name} is {shown}; {what} must be {finite}{allowed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOptions:
    """What is minimised: the weight of each term, and which rows count how much. The defaults are DSpark's."""

    ce: float = 0.1  # cross entropy with the label
    l1: float = 0.9  # full L1 to the teacher
    tv: float = 0.0  # total variation, which is half of l1 and the same term: 1.8 here is 0.9 there; give one of them
    kl: float = 0.0  # divergence from the teacher to the drafter
    confidence: float = 1.0  # of the confidence head against the row's overlap; 0: a drafter without the head
    label: Label = "data"  # of ce: the answer's own token, or the teacher's most probable one
    weights: RowWeights = "exponential"  # of rows; dpace: by how likely the labels before and after are, for ce alone
    gamma: float = 4.0  # decay of exponential weights, in drafts
    alpha: float = 0.5  # smoothing of dpace weights, above 0 to 1 (all rows as if sure)
    normalise: Normaliser = "weights"  # what sums over rows are divided by: their weights, or how many count
    cumulative_mask: bool = True  # a row counts only if all labels before it in its block count; False: its own alone

    def __post_init__(self) -> None:
        _choose("losses.label", self.label, Label)
        _choose("losses.weights", self.weights, RowWeights)
        _choose("losses.normalise", self.normalise, Normaliser)
        terms = {name: getattr(self, name) for name in ("ce", "l1", "tv", "kl", "confidence")}
        ranges = {**dict.fromkeys(terms, Range()), "gamma": POSITIVE, "alpha": Range(0, 1, above=True)}
        _check_ranges(self, ranges, "losses.")
        if self.l1 and self.tv:
            raise ConfigError(
                f"losses.tv is {self.tv} and losses.l1 {self.l1}, but tv is half of l1: one term; set one of them to 0"
            )
        if not self.ce + self.distribution:
            raise ConfigError("losses: ce, l1, tv and kl are all 0; give one of them a weight")
        if self.weights == "dpace" and self.distribution + self.confidence:
            others = ", ".join(name for name, weight in terms.items() if weight and name != "ce")
            raise ConfigError(f"losses.weights is 'dpace', which weighs cross entropy only; set {others} to 0")

    @property
    def full_l1(self) -> float:
        """The weight of the full L1, by whichever name it was given."""
        return self.l1 + self.tv / 2

    @property
    def distribution(self) -> float:
        """Above 0 if a term compares whole distributions."""
        return self.full_l1 + self.kl


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimOptions:
    """Rates at the top of the schedule."""

    method: Method = "muon"  # of the body's matrices; everything else is moved by AdamW in both
    muon_lr: float = 4e-3  # times 0.2 sqrt(max(rows, columns))
    adam_lr: float = 2e-3
    momentum: float = 0.95  # Muon's, Nesterov
    betas: tuple[float, float] = (0.9, 0.98)  # AdamW's
    weight_decay: float = 0.0  # of matrices, times their rate
    clip: float = 1.0  # norm of all gradients; 0: off

    def __post_init__(self) -> None:
        _choose("optim.method", self.method, Method)
        if len(self.betas) != 2:
            raise ConfigError(f"optim.betas is {list(self.betas)}; give two: of the mean and of the square")
        rates = dict.fromkeys(("muon_lr", "adam_lr", "weight_decay", "clip"), Range())
        _check_ranges(self, {**rates, "momentum": FACTOR, "betas": FACTOR}, "optim.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a drafter is trained. Sizes suit a small target on one large GPU; a CPU run wants far less."""

    losses: LossOptions = field(default_factory=LossOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    schedule: Schedule = "linear"  # decay to 0 after the warm-up
    warmup: float = 0.02  # share of the run
    row_tokens: int = 1024  # T: tokens of a packed row of documents
    batch_rows: int = 16  # B: packed rows of a step
    block_rows: int = 2048  # Q: block rows per packed row, about; they are filled with whole blocks
    anchors: Anchors = "next_scored"  # drawn where an answer goes on; scored: anywhere in it but at the row's very end
    feature_noise: float = 0.0  # deviation of noise on the target's features, in each column's RMS
    short_block: int = 0  # rows of the shorter blocks that are mixed in; 0: all blocks have block_size rows
    short_share: float = 0.65  # share of block rows in shorter blocks
    target_layer_ids: tuple[int, ...] = ()  # taps; empty: five layers, evenly spaced from 1 to L - 3
    mask_token_id: int = 0  # an id that answers do not hold
    intermediate_size: int | None = None  # MLP width of the drafter; None: the target's
    graphs: bool = True  # replay compiled steps as CUDA graphs on a GPU
    greedy_share: float = 0.55  # answers at T = 0; the others are drawn
    sampled_temperature: float = 1.0  # of answers that are drawn
    mix: tuple[float, float, float] = (0.3, 0.35, 0.35)  # of self-made prompts: code, mathematics, chat
    max_new_tokens: int = 448  # of an answer
    max_length: int = 640  # prompt and answer
    num_slots: int = 2048  # answers generated side by side
    held_out: int = 128  # greedy answers kept for validation

    def __post_init__(self) -> None:
        _choose("recipe.schedule", self.schedule, Schedule)
        _choose("recipe.anchors", self.anchors, Anchors)
        _check_ranges(self, _RECIPE, "recipe.")
        if len(self.mix) != 3 or sum(self.mix) <= 0:
            raise ConfigError(f"recipe.mix is {list(self.mix)}; give three shares: code, mathematics, chat")


_RECIPE = {
    "warmup": FACTOR, "row_tokens": Range(2), "batch_rows": COUNT, "block_rows": COUNT, "feature_noise": Range(),
    "short_block": Range(), "short_share": SHARE, "target_layer_ids": Range(), "mask_token_id": Range(),
    "intermediate_size": COUNT, "greedy_share": SHARE, "sampled_temperature": POSITIVE, "mix": Range(),
    "max_new_tokens": Range(MIN_ANSWER_TOKENS), "max_length": Range(2 * MIN_ANSWER_TOKENS + 1), "num_slots": COUNT,
    "held_out": Range(),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """One run of `slipstream train`. Paths may not exist yet unless said otherwise."""

    model: str  # the target to draft for: a name, a folder or a .gguf file
    out: Path  # folder of the run: drafter/, checkpoint/, answers, logs
    algorithm: Literal["dspark", "dflash"] = "dspark"
    prompts: tuple[
        Path, ...
    ] = ()  # JSONL files of {"turns": [...]}, existing; more prompts are made by the target itself
    answers: tuple[
        Path, ...
    ] = ()  # answers of earlier runs, existing; empty: OUT/answers.safetensors, generated if missing
    answer_tokens: int = 2_000_000  # answer tokens to generate
    steps: int = 2000  # optimiser steps
    minutes: float | None = None  # end the schedule after this time if the steps are not done; not reproducible
    block_size: int = 8  # rows of a block, anchor included: B drafts with dspark, B - 1 with dflash
    num_layers: int = 2  # layers of the drafter
    draft_vocab_size: int = 16384  # tokens that can be drafted, the most frequent in the answers; 0: all
    markov_rank: int = 32  # of dspark's Markov head
    seed: int = 0  # of answers, initial weights, order and anchors
    init: str | None = None  # a drafter of this shape to go on from, by name or folder; None: random weights
    processes: int = 1  # that share every batch, one a GPU; batch_rows must be a multiple
    device: str = "auto"  # auto, cpu, cuda
    resume: bool = False  # go on from OUT/checkpoint
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        if self.algorithm not in ("dspark", "dflash"):
            raise ConfigError(f"algorithm is {self.algorithm!r}; choose dspark or dflash")
        _check_ranges(self, _RUN)
        if self.recipe.batch_rows % self.processes:
            raise ConfigError(
                f"processes is {self.processes} and batch_rows {self.recipe.batch_rows} is no multiple of it; change one"
            )
        short = self.recipe.short_block
        if short and not 2 <= short <= self.block_size:
            raise ConfigError(
                f"short_block is {short}; it must lie between 2 and block_size {self.block_size}, or be 0"
            )
        self._refuse_options_without_effect()

    def _refuse_options_without_effect(self) -> None:
        losses = self.recipe.losses
        for where, given, names in (
            ("with answers, which are read and not made", bool(self.answers), ("prompts", "answer_tokens")),
            ("with resume, which goes on from OUT/checkpoint", self.resume, ("init",)),
            ("with dflash, which has no Markov head", self.algorithm == "dflash", ("markov_rank",)),
        ):
            for name in names if given else ():
                if getattr(self, name) != _default(TrainOptions, name):
                    raise ConfigError(f"{name}: no effect {where}; leave it out")
        for name, needed in (("gamma", "exponential"), ("alpha", "dpace")):
            if losses.weights != needed and getattr(losses, name) != _default(LossOptions, name):
                raise ConfigError(f"recipe.losses.{name}: no effect with weights {losses.weights!r}; leave it out")
        if not self.recipe.short_block and self.recipe.short_share != _default(Recipe, "short_share"):
            raise ConfigError("recipe.short_share: no effect without short_block; leave it out")

    def made_by(self) -> dict[str, Any]:
        """What generated answers depend on, as JSON has it; the number of processes aside."""
        names = ("max_new_tokens", "max_length", "greedy_share", "sampled_temperature", "mix")
        made = {name: getattr(self, name) for name in ("model", "answer_tokens", "seed")}
        made |= {"prompts": [str(path) for path in self.prompts]}
        made |= {f"recipe.{name}": getattr(self.recipe, name) for name in names}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in made.items()}

    def block_lengths(self) -> tuple[int, ...]:
        """Rows of each block of a packed row: whole blocks, `block_rows` in all if a share near the wanted one allows."""
        long, short, rows = self.block_size, self.recipe.short_block or self.block_size, self.recipe.block_rows
        wanted = 0.0 if short == long else rows * self.recipe.short_share
        counts = sorted(range(rows // short + 1), key=lambda count: abs(count * short - wanted))
        num_short = next((count for count in counts if (rows - count * short) % long == 0), counts[0])
        return (short,) * num_short + (long,) * max((rows - num_short * short) // long, 0 if num_short else 1)


_RUN = {
    "answer_tokens": COUNT, "steps": COUNT, "minutes": POSITIVE, "block_size": Range(2), "num_layers": COUNT,
    "draft_vocab_size": Range(), "markov_rank": Range(), "processes": COUNT,
    "seed": Range(0, 2**32 - 1),  # every stream of random numbers adds its own to it, in 64 bits
}  # fmt: skip
