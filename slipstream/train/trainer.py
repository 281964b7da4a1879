"""The training of a drafter, step by step, on one process or on several that share each batch.

Each step: a batch of packed answers goes through the frozen target (features of the tapped layers, teacher from its
last hidden states); anchors are drawn; the drafter drafts all their blocks at once; losses; one update. Batches,
anchors and block lengths are functions of (seed, step), so the state of a run is its weights, moments and step number,
and a resumed run equals an uninterrupted one. `minutes` trades that for a schedule that ends on time. Nothing here
serves; serving does not import it. Called by `run`.

Shapes: B packed rows, T tokens per row, Q block rows per row, H hidden size, K taps, V vocabulary, Vd draft vocabulary.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from slipstream.config import CALIBRATION_FILE
from slipstream.errors import ConfigError, EngineError
from slipstream.models.checkpoint import DrafterSpec
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter, save_drafter
from slipstream.models.spec import FULL
from slipstream.train.answers import AnswerSet
from slipstream.train.attend import Backend, Dense, Flex, PackedAttend, PackedBlockAttend, packed_block_mask
from slipstream.train.data import (
    BatchOrder,
    Blocks,
    PackedRows,
    anchor_candidates,
    draft_vocabulary,
    draw_blocks,
    pack,
    scored_candidates,
)
from slipstream.train.logs import RunLog, progress_bar
from slipstream.train.losses import (
    RowLosses,
    decay,
    dpace,
    fused_rows,
    label_shift,
    normaliser,
    row_mask,
    total_loss,
)
from slipstream.train.optim import MasterOptimizer
from slipstream.train.options import TrainOptions
from slipstream.train.parallel import ALONE, Ranks
from slipstream.train.state import RunState
from slipstream.train.walks import block_inputs, block_positions, evaluate

LOG_EVERY = 20  # steps
CHECKPOINTS = 4  # in a run, the last one at its end
VALIDATIONS = 8  # in a run
VALIDATION_DRAFTS = 7
SKIPPED_POSITIONS = 4  # first tokens of a document, whose features are far out of scale (attention sinks)
NOISE_SEEDS = 1 << 40  # apart from the seeds of anchors
SAMPLE_ROWS = 32  # packed rows that the feature scale is measured on


def drafter_spec(options: TrainOptions, target: Decoder) -> DrafterSpec:
    """The drafter that `options` ask for: layers shaped like the target's, its embedding and head."""
    spec, recipe, dspark = target.spec, options.recipe, options.algorithm == "dspark"
    confidence = dspark and recipe.losses.confidence > 0  # an untrained head would be believed
    depth = spec.num_layers
    _refuse_unfit(options, target)
    taps = recipe.target_layer_ids or tuple(sorted({max(0, round(1 + i * (depth - 4) / 4)) for i in range(5)}))
    reduced = 0 < options.draft_vocab_size < spec.vocab_size
    return DrafterSpec(
        algorithm=options.algorithm,
        layout="anchor_first" if dspark else "fill_in",
        layout_reason="trained so",
        block_size=options.block_size,
        num_layers=options.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=recipe.intermediate_size or spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope=spec.rope,
        max_position_embeddings=spec.max_position_embeddings,
        layer_types=(FULL,) * options.num_layers,
        target_layer_ids=taps,
        num_target_layers=depth,
        target_hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        draft_vocab_size=options.draft_vocab_size if reduced else None,
        mask_token_id=recipe.mask_token_id,
        markov_rank=options.markov_rank if dspark else 0,
        confidence_head=confidence,
        confidence_with_markov=confidence and options.markov_rank > 0,
    )


def _refuse_unfit(options: TrainOptions, target: Decoder) -> None:
    """ConfigError for what this target does not have."""
    spec, recipe = target.spec, options.recipe
    if options.block_size > spec.max_position_embeddings:
        raise ConfigError(
            f"block_size is {options.block_size}, the target has {spec.max_position_embeddings} positions; lower it"
        )
    if recipe.mask_token_id >= spec.vocab_size:
        raise ConfigError(
            f"recipe.mask_token_id is {recipe.mask_token_id}; the target's tokens end at {spec.vocab_size - 1}"
        )
    if max(recipe.target_layer_ids, default=0) >= spec.num_layers:
        raise ConfigError(
            f"recipe.target_layer_ids is {list(recipe.target_layer_ids)}; the target's layers end at {spec.num_layers - 1}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class RowTargets:
    """What each block row is to predict, and whether it counts. Filled by `Trainer.targets`."""

    previous: Tensor  # [B, Q] token before the predicted one, as the Markov head is taught
    labels: Tensor  # [B, Q] draft ids of the data's tokens, -1 outside the draft vocabulary
    teacher: Tensor  # [B * Q] row of the teacher's table
    mask: Tensor  # [B, Q] bool, rows that count


class Trainer:
    """One run.

    What is fixed is made in `__init__`; what changes is the optimiser, the step number and the time spent.
    """

    def __init__(
        self, options: TrainOptions, target: Decoder, answers: AnswerSet, console: Console, ranks: Ranks = ALONE,
        start: BlockDrafter | None = None,
    ) -> None:  # fmt: skip
        """start: a trained drafter of the same shape to go on from."""
        self.options, self.recipe, self.target = options, options.recipe, target
        self.console, self.ranks, self.log = console, ranks, RunLog(options.out, console)
        self.device = target.embed_tokens.weight.device
        fast = self.device.type == "cuda"
        self.backend: Backend = Flex() if fast else Dense()
        self.graphs = fast and self.recipe.graphs
        self.run_target = _compiled(target.forward, self.graphs) if fast else target.forward
        self.row_losses = _compiled(self._row_losses, self.graphs) if fast else self._row_losses
        self.training_set, self.validation_set = _split(answers, self.recipe.held_out)
        if len(self.training_set) == 0:
            raise ConfigError("there are no answers to train on; name other answers")
        self.digest = answers.digest()
        self.spec = drafter_spec(options, target)
        packed, _ = pack(self.training_set, self.recipe.row_tokens)
        self.rows = packed.to(self.device)
        self._report_cuts()
        self.order = BatchOrder(len(packed), self.recipe.batch_rows, options.seed)
        self.lengths = options.block_lengths()
        self.step, self.seconds = 0, 0.0
        self.broken = torch.zeros((), dtype=torch.int64, device=self.device)  # steps whose loss or norm is not finite
        self.scale = self._feature_scale()  # [K * H] fp32
        self.drafter = BlockDrafter(self.spec, target.embed_tokens.weight.dtype, self.device)
        self._begin(start)
        self.optimizer = MasterOptimizer(self.drafter, self.recipe.optim)

    def _report_cuts(self) -> None:
        """Say how many answers a packed row is too short for; nothing left to train on is an error."""
        room = self.recipe.row_tokens
        too_long = int((np.diff(self.training_set.starts) > room).sum())
        if not bool(self._candidates(self.rows).any()):
            raise ConfigError(
                f"recipe.row_tokens is {room}: in rows of that length no answer goes on behind its prompt; raise it"
            )
        if too_long:
            self.console.print(
                f"{too_long} of {len(self.training_set)} answers are cut at row_tokens {room}, prompt included"
            )

    @torch.no_grad()
    def _begin(self, start: BlockDrafter | None) -> None:
        """The first weights and the draft vocabulary: random and by frequency, or those of `start`."""
        if start is None:
            self.drafter.init_random(self.options.seed)
            self.drafter.norm.weight.copy_(self.target.norm.weight)
            size, keep = self.spec.num_draft_logits, self.target.spec.eos_token_ids
            kept = draft_vocabulary(self.training_set, size, self.spec.vocab_size, keep)
            self._use_vocabulary(torch.from_numpy(kept))
            return
        for name in (f.name for f in dataclasses.fields(DrafterSpec) if f.name != "layout_reason"):
            ours, theirs = getattr(self.spec, name), getattr(start.spec, name)
            if ours != theirs:
                raise ConfigError(f"init: its {name} is {theirs}, this run asks for {ours}; make them equal")
        self.drafter.load_state_dict(start.state_dict())
        self.drafter.fc.weight.copy_(start.fc.weight / self.scale)
        self._use_vocabulary(start.draft_token_ids)

    def _use_vocabulary(self, kept: Tensor) -> None:
        """kept [Vd]: the target ids that are drafted."""
        self.kept = kept.to(self.device)
        self.drafter.set_draft_vocabulary(self.kept)
        self.drafter.share(self.target)
        self.to_draft = torch.full((self.spec.vocab_size,), -1, dtype=torch.int64, device=self.device)
        self.to_draft[self.kept] = torch.arange(len(self.kept), device=self.device)

    @torch.no_grad()
    def _feature_scale(self) -> Tensor:
        """1 / RMS of each feature column, the first tokens of documents left out: raw columns differ by orders."""
        size, count = len(self.spec.target_layer_ids) * self.spec.target_hidden_size, 0
        total = torch.zeros(size, device=self.device)
        for row in range(min(SAMPLE_ROWS, len(self.rows))):
            rows = self.rows.take(torch.tensor([row], device=self.device))
            _, features = self._look(rows, Dense(), self.target.forward)
            usual = rows.positions.flatten() >= SKIPPED_POSITIONS
            total += (features.float().square() * usual[:, None]).sum(dim=0)
            count += int(usual.sum())
        return (total / max(1, count) + 1e-8).rsqrt()

    @torch.no_grad()
    def _look(self, rows: PackedRows, backend: Backend, run_target: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        """The target's view of packed rows: last hidden states [B * T, H] and features [B * T, K * H]."""
        attend = PackedAttend(self.target, rows, backend)
        hidden, features = run_target(
            rows.token_ids.flatten(), rows.positions.flatten(), attend, self.spec.target_layer_ids
        )
        return hidden, features

    # ---- a step --------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, Tensor]:
        """Step `self.step`; returns the terms of its loss, this rank's share of each (they add up)."""
        if self.graphs:
            # What the last step's graphs returned may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        index = self.order.rows(self.step)
        rows = self.rows.take(torch.from_numpy(index).to(self.device))
        seed = self.options.seed * 1_000_003 + self.step
        blocks = draw_blocks(rows, self.lengths, seed, self._candidates(rows))
        noise, mine = self._feature_noise(rows, seed), self.ranks.share(len(index))
        loss, terms = self.loss(rows.take(mine), blocks.take(mine), None if noise is None else noise[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        factor = schedule(self.progress, self.recipe.warmup, self.recipe.schedule)
        norm = self.optimizer.step(factor, self.ranks.add_up)
        self.step += 1
        self.broken += ~(loss.detach() + norm).isfinite()
        return {"loss": loss.detach(), **terms, "norm": norm / self.ranks.count}

    def _candidates(self, rows: PackedRows) -> Tensor:
        """[B, T] columns that may be anchors."""
        if self.recipe.anchors == "scored":
            return scored_candidates(rows, self.options.block_size)
        return anchor_candidates(rows)

    def _feature_noise(self, rows: PackedRows, seed: int) -> Tensor | None:
        """[B, T, K * H] to be added to the features of the whole batch, so that each rank sees its part of one draw."""
        if not self.recipe.feature_noise:
            return None
        shape = (*rows.token_ids.shape, self.scale.shape[0])
        rng = torch.Generator(self.device).manual_seed(seed + NOISE_SEEDS)
        return torch.randn(shape, generator=rng, device=self.device) * (self.recipe.feature_noise / self.scale)

    def loss(self, rows: PackedRows, blocks: Blocks, noise: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """These rows' share of the batch's loss, and of its terms: ce, l1, ..., overlap and rows [block_size]."""
        targets = self.targets(rows, blocks)
        hidden, features = self._look(rows, self.backend, self.run_target)
        if noise is not None:
            features = features + noise.flatten(0, 1).to(features.dtype)
        mask = packed_block_mask(rows, blocks, self.backend)
        parts = self.row_losses(
            rows.positions.flatten(), hidden, features, block_inputs(rows, blocks, self.spec.mask_token_id),
            block_positions(rows, blocks, self.spec.max_position_embeddings), mask, targets,
        )  # fmt: skip
        weights = self.weights(targets.mask, blocks, parts.label_prob)
        norm = normaliser(weights, targets.mask, self.recipe.losses)[None]
        self.ranks.add_up([norm])
        loss, terms = total_loss(parts, weights.flatten(), self.recipe.losses, norm[0])
        return loss, terms | self._by_place(parts.overlap.view_as(targets.mask), targets.mask, blocks)

    def targets(self, rows: PackedRows, blocks: Blocks) -> RowTargets:
        num_rows, tokens = rows.token_ids.shape
        places = blocks.anchors + blocks.offsets + label_shift(self.spec.layout)  # [B, Q] columns of the labels
        cumulative = self.recipe.losses.cumulative_mask
        mask = row_mask(rows.scored, rows.starts, blocks.anchors, places, cumulative) & blocks.live
        before = torch.maximum(places - 1, blocks.anchors).clamp(max=tokens - 1)  # column of the previous token
        first = torch.arange(num_rows, device=self.device)[:, None] * tokens
        return RowTargets(
            previous=rows.token_ids.gather(1, before),
            labels=self.to_draft[rows.token_ids.gather(1, places.clamp(max=tokens - 1))],
            teacher=(first + before).flatten(),
            mask=mask,
        )

    def weights(self, mask: Tensor, blocks: Blocks, label_prob: Tensor) -> Tensor:
        """[B, Q] fp32, 0 outside the mask: how much each row counts."""
        options = self.recipe.losses
        if options.weights == "dpace":
            return dpace(label_prob.view_as(mask), mask, blocks.offsets, options.alpha, self.options.block_size)
        return decay(blocks.offsets, self.spec.layout, options.gamma) * mask

    def _row_losses(
        self, positions: Tensor, hidden: Tensor, features: Tensor, token_ids: Tensor, block_positions: Tensor,
        mask: Any, targets: RowTargets,
    ) -> RowLosses:  # fmt: skip
        """The drafter's part, from the target's hidden states and features [B * T, ...] to the losses of its rows."""
        teacher, options = self.target.logits(hidden), self.recipe.losses
        table = teacher_table(teacher, self.kept if self.spec.draft_vocab_size else None)
        labels = targets.labels.flatten()
        if options.label == "teacher":
            labels = self.to_draft[teacher.argmax(dim=-1)][targets.teacher]
        context = self.drafter.context_kv(features.float() * self.scale, positions)
        attend = PackedBlockAttend(context, mask, self.backend)
        drafted = self.drafter.hidden(self.drafter.embed(token_ids), block_positions, attend)  # [B, Q, H]
        bias = self._markov_bias(targets.previous, drafted)
        has_confidence = self.drafter.confidence_head is not None
        confidence = self.drafter.confidence(drafted, targets.previous).flatten() if has_confidence else None
        base = self.drafter.base_logits(drafted).flatten(0, 1)
        return fused_rows(base, bias, table, targets.teacher, labels, confidence, with_kl=options.kl > 0)

    def _markov_bias(self, previous: Tensor, drafted: Tensor) -> Tensor | None:
        """[B * Q, Vd]; a recurrent head runs over each block, so its blocks must be of one length."""
        if self.drafter.markov_head is None:
            return None
        if self.spec.markov_head_type == "rnn":
            if len(set(self.lengths)) > 1:
                raise ConfigError("an rnn Markov head needs blocks of one length; set short_block to 0")
            previous, drafted = previous.view(-1, self.lengths[0]), drafted.view(-1, self.lengths[0], drafted.shape[-1])
        return self.drafter.markov_bias(previous, drafted).flatten(0, 1)

    def _by_place(self, overlap: Tensor, mask: Tensor, blocks: Blocks) -> dict[str, Tensor]:
        """Sum of overlaps, and how many rows there are, by place in the block."""
        zeros = torch.zeros(self.options.block_size, device=self.device)
        return {
            "overlap": zeros.index_add(0, blocks.offsets, (overlap * mask).sum(dim=0)),
            "rows": zeros.index_add(0, blocks.offsets, mask.float().sum(dim=0)),
        }

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 to 1: by steps, or by time if that is nearer its end."""
        share = self.step / self.options.steps
        if self.options.minutes is not None:
            share = max(share, self.seconds / (60 * self.options.minutes))
        return min(1.0, share)

    # ---- the run -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end, with logs, validations and checkpoints; then write the drafter."""
        if self.options.resume:
            self.load_checkpoint()
            if self.progress >= 1.0:
                self.console.print(f"this run is done: its drafter is {self.options.out / 'drafter'}")
                return
        if self.ranks.leads:
            self.log.begin(self.step)
        self.console.print(
            f"{self.options.algorithm}: {self.training_set.num_answer_tokens} answer tokens in {len(self.rows)} rows, "
            f"{len(self.lengths)} blocks per row, {self.options.steps} steps on {self.ranks.count} x {self.device}"
        )
        spent, started = self.seconds, time.monotonic()
        validate_at, save_at = self.progress + 1 / VALIDATIONS, self.progress + 1 / CHECKPOINTS
        with progress_bar(self.console) as bar:
            task = bar.add_task("steps", total=self.options.steps, completed=self.step)
            while self.progress < 1.0:
                terms = self.train_step()
                if self.step % LOG_EVERY == 0:
                    self._log(terms)
                self.seconds = self.ranks.agree(spent + time.monotonic() - started)
                bar.update(task, completed=self.step)
                if self.progress >= validate_at and self.progress < 1.0:
                    validate_at += 1 / VALIDATIONS
                    self._validate()
                if self.progress >= save_at and self.progress < 1.0:
                    save_at += 1 / CHECKPOINTS
                    self.save()
        self._validate()
        self.save()
        self.console.print(f"drafter -> {self.options.out / 'drafter'}")

    @torch.no_grad()
    def _refuse_divergence(self) -> None:
        """Stop before anything of a run that went astray is kept. Waits for the device: not for every step."""
        broken, masters = int(self.broken), list(self.optimizer.masters.values())
        if broken or not bool(torch.stack(torch._foreach_norm(masters)).isfinite().all()):
            raise EngineError(
                f"step {self.step - max(0, broken - 1)}: loss, gradients or weights are not finite, and nothing was saved "
                "since; lower recipe.optim.muon_lr and adam_lr, or raise recipe.warmup"
            )

    def _log(self, terms: dict[str, Tensor]) -> None:
        self.ranks.add_up(list(terms.values()))
        mean = (terms["overlap"] / terms["rows"].clamp(min=1.0))[1 - label_shift(self.spec.layout) :].tolist()
        values = {name: term.item() for name, term in terms.items() if term.ndim == 0}
        # Tokens per step that these overlaps promise at T = 1.
        values["tau"] = 1.0 + float(np.cumprod(mean[:VALIDATION_DRAFTS]).sum())
        if self.ranks.leads:
            self.log.losses(self.step, self.seconds, values, mean)
            if self.step % (10 * LOG_EVERY) == 0:
                self.log.show(self.step, self.seconds, values)
        self._refuse_divergence()

    def _validate(self) -> None:
        self._refuse_divergence()
        if self.ranks.leads and len(self.validation_set):
            report = evaluate(
                self.target, self.drafter, self.validation_set, min(VALIDATION_DRAFTS, self.spec.max_draft_tokens),
                scale=self.scale, row_tokens=self.recipe.row_tokens, batch_rows=self.recipe.batch_rows,
            )  # fmt: skip
            self.log.validation(self.step, self.seconds, report)
        self.ranks.wait()

    # ---- files ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write OUT/checkpoint, OUT/drafter (the masters in bf16, the feature scale folded into fc) and the plot."""
        if not self.ranks.leads:
            return
        self._refuse_divergence()
        self.save_checkpoint()
        self._drop_calibration()
        weight, master = self.drafter.fc.weight, self.optimizer.masters["fc.weight"]
        extra = {"training": {**self._fixed_options(), "minutes": self.options.minutes, "steps_done": self.step}}
        with torch.no_grad():
            weight.copy_(master * self.scale)
            save_drafter(self.drafter, self.options.out / "drafter", extra)
            weight.copy_(master)
        self.log.plot()

    def _drop_calibration(self) -> None:
        """A calibration beside the drafter is one of the weights that are about to be replaced."""
        path = self.options.out / "drafter" / CALIBRATION_FILE
        if path.exists():
            path.unlink()
            self.console.print(f"{path} was fitted to earlier weights and is removed; calibrate again")

    def _tensors(self) -> dict[str, Tensor]:
        return {**self.optimizer.state(), "scale": self.scale, "kept": self.kept}

    def save_checkpoint(self) -> None:
        state = RunState(self.step, self.seconds, self._fixed_options(), self.digest, self._tensors())
        state.save(self.options.out / "checkpoint")

    def load_checkpoint(self) -> None:
        """Go on where the checkpoint stands; raises if it is missing or of other options, answers or shapes."""
        state = RunState.load(self.options.out / "checkpoint", self._fixed_options(), self.digest, self._tensors())
        self.scale = state.tensors["scale"].to(self.device)
        self._use_vocabulary(state.tensors["kept"])
        self.step, self.seconds = state.step, state.seconds
        self.optimizer.load(state.tensors, self.step)

    def _fixed_options(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it goes on with."""
        free = ("out", "resume", "device", "minutes", "answers", "prompts", "answer_tokens", "processes", "init")
        return {name: value for name, value in _jsonable(dataclasses.asdict(self.options)).items() if name not in free}


def _compiled(function: Callable[..., Any], graphs: bool) -> Callable[..., Any]:
    """For the one set of shapes that a run has; a GPU is faster than the host can launch a step's small operations.

    What it brought, with the other changes of that day, is in docs/LOG.md.
    """
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, mode="reduce-overhead" if graphs else None)
    return compiled


def teacher_table(logits: Tensor, kept: Tensor | None) -> Tensor:
    """The target's full softmax [M, V] -> its probabilities of the kept tokens [M, Vd], in the logits' dtype."""
    log_sum = logits.float().logsumexp(dim=-1, keepdim=True)
    chosen = logits if kept is None else logits[:, kept]
    return (chosen.float() - log_sum).exp().to(logits.dtype)


def schedule(progress: float, warmup: float, kind: str) -> float:
    """The learning rate's factor at a share of the run: linear warm-up, then linear or cosine decay to 0."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    left = (1.0 - progress) / (1.0 - warmup)
    return left if kind == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)


def _split(answers: AnswerSet, held_out: int) -> tuple[AnswerSet, AnswerSet]:
    """Training answers and greedy ones for validation, at most a quarter of the greedy ones; spread over the file."""
    greedy = np.flatnonzero(answers.temperatures == 0)
    count = min(held_out, len(greedy) // 4)
    chosen = greedy[np.linspace(0, len(greedy) - 1, count).astype(np.int64)] if count else greedy[:0]
    rest = np.setdiff1d(np.arange(len(answers)), chosen)
    return answers.select(rest), answers.select(chosen)


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value
