"""Training on a toy: the generator's tokens, the walk's runs, a loss that falls, acceptance above chance, resuming."""

import csv
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file, save_file

from slipstream.draft.ngram import MAX_MATCH
from slipstream.errors import CheckpointError, ConfigError, EngineError
from slipstream.models.block_attend import DenseBlockAttend
from slipstream.models.decoder import Decoder
from slipstream.models.drafters import BlockDrafter, load_drafter
from slipstream.models.layers import DenseAttend
from slipstream.models.rope import RopeSpec
from slipstream.models.spec import DecoderSpec
from slipstream.ops.lookup import lookup
from slipstream.options import build
from slipstream.train.answers import Answer, AnswerSet, Job, SlotGenerator
from slipstream.train.attend import Dense, Flex, PackedAttend, packed_block_mask
from slipstream.train.data import PackedRows, anchor_candidates, draw_blocks, pack
from slipstream.train.logs import RunLog
from slipstream.train.options import LossOptions, OptimOptions, Recipe, TrainOptions
from slipstream.train.parallel import Ranks, launch
from slipstream.train.presets import PRESETS, with_preset
from slipstream.train.prompts import generate_answers, greedy_answers
from slipstream.train.run import load_or_generate
from slipstream.train.trainer import Trainer, drafter_spec
from slipstream.train.walks import draft_greedily, evaluate, matching_runs, summarise, walk

VOCAB = 96
EOS = 2


def tiny() -> Decoder:
    spec = DecoderSpec(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=10000.0),
        max_position_embeddings=128,
        tie_word_embeddings=True,
        layer_types=("full_attention",) * 4,
        eos_token_ids=(EOS,),
    )
    return Decoder(spec).init_random(3, std=0.15)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny()


def jobs(count: int, seed: int = 0) -> list[Job]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(5, VOCAB) for _ in range(rng.randrange(2, 9))) for _ in range(count)]
    return [Job(prompt_ids=ids, temperature=float(i % 2), max_new_tokens=40) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def answers(target: Decoder) -> AnswerSet:
    generator = SlotGenerator(target, num_slots=32, max_length=64, seed=0)
    return AnswerSet.from_answers(list(generator.run(jobs(240))), cut_loops=True)


def options(out: Path, algorithm: str = "dspark", steps: int = 60, **changes: object) -> TrainOptions:
    recipe = Recipe(
        row_tokens=64, batch_rows=8, block_rows=72, short_block=4 if algorithm == "dspark" else 0, held_out=16,
        mask_token_id=1, target_layer_ids=(0, 2), losses=LossOptions(), optim=OptimOptions(muon_lr=8e-3, adam_lr=4e-3),
    )  # fmt: skip
    given = {"block_size": 8, "draft_vocab_size": 64, "recipe": recipe, **changes}
    if algorithm == "dspark":
        given.setdefault("markov_rank", 8)
    return TrainOptions(model="tiny", out=out, algorithm=algorithm, steps=steps, **given)  # type: ignore[arg-type]


def quiet() -> Console:
    return Console(quiet=True)


def greedy_by_hand(target: Decoder, prompt: tuple[int, ...], limit: int) -> tuple[int, ...]:
    ids = list(prompt)
    while len(ids) - len(prompt) < limit and (len(ids) == len(prompt) or ids[-1] != EOS):
        hidden, _ = target(torch.tensor(ids), torch.arange(len(ids)), DenseAttend(target.spec))
        ids.append(int(target.logits(hidden[-1]).argmax()))
    return tuple(ids[len(prompt) :])


def test_slots_give_the_tokens_of_naive_decoding(target: Decoder) -> None:
    """More jobs than slots, so slots are refilled while others are under way; sampled neighbours do not disturb."""
    asked = jobs(23)
    generator = SlotGenerator(target, num_slots=5, max_length=64, seed=1)
    found = {answer.job: answer for answer in generator.run(asked)}
    assert len(found) == len(asked)
    for job in asked[::2]:
        expected = greedy_by_hand(target, job.prompt_ids, job.max_new_tokens)
        assert found[job].token_ids == expected
        assert found[job].finished == (expected[-1] == EOS)


def test_windows_are_kept(target: Decoder) -> None:
    """Sliding layers see their window and no further, whole ones all: greedy answers equal naive decoding again."""
    layers = ("sliding_attention", "full_attention", "sliding_attention", "sliding_attention")
    windowed = Decoder(dataclasses.replace(target.spec, sliding_window=5, layer_types=layers))
    windowed.load_state_dict(target.state_dict())
    asked = [dataclasses.replace(job, temperature=0.0) for job in jobs(8, seed=4)]
    differ = 0
    for answer in SlotGenerator(windowed, num_slots=3, max_length=64, seed=1).run(asked):
        job = answer.job
        assert answer.token_ids == greedy_by_hand(windowed, job.prompt_ids, job.max_new_tokens)
        differ += answer.token_ids != greedy_by_hand(target, job.prompt_ids, job.max_new_tokens)
    assert differ > 4, "inconclusive: the windows hide nothing that matters"


def test_sampled_slots_follow_the_softmax(target: Decoder) -> None:
    """First tokens of 4,000 draws at T = 1: every frequency within 5 standard deviations (fails once in 10^4 seeds)."""
    prompt, draws = (7, 9, 11), 4000
    generator = SlotGenerator(target, num_slots=500, max_length=8, seed=5)
    found = generator.run([Job(prompt_ids=prompt, temperature=1.0, max_new_tokens=1)] * draws)
    counts = torch.bincount(torch.tensor([answer.token_ids[0] for answer in found]), minlength=VOCAB)
    hidden, _ = target(torch.tensor(prompt), torch.arange(3), DenseAttend(target.spec))
    expected = target.logits(hidden[-1]).softmax(-1)
    spread = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() <= 5 * spread + 1e-3).all()


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_runs_equal_drafting_one_anchor_at_a_time(target: Decoder, answers: AnswerSet, algorithm: str) -> None:
    """The packed walk against a drafter that sees one document, one anchor and nothing else."""
    spec = drafter_spec(options(Path("unused"), algorithm), target)
    drafter = BlockDrafter(spec).init_random(1, std=0.3)
    drafter.set_draft_vocabulary(torch.arange(0, 64))
    drafter.share(target)
    few = answers.select(np.arange(6))
    drafts = 5
    runs, placement = matching_runs(target, drafter, few, drafts, row_tokens=64, batch_rows=2)
    hits = 0
    for document in range(len(few)):
        ids = torch.from_numpy(few.text(document).astype(np.int64))
        _, features = target(ids, torch.arange(len(ids)), DenseAttend(target.spec), spec.target_layer_ids)
        first = int(few.prompt_lengths[document])
        for at in range(first, len(ids) - 1):
            drafted = draft_alone(drafter, ids, features, at, drafts)
            wanted = ids[at + 1 : at + 1 + drafts].tolist()
            run = next((k for k, (a, b) in enumerate(zip(drafted, wanted, strict=False)) if a != b), len(wanted))
            assert runs[placement.rows[document], placement.columns[document] + at] == run
            hits += run
        emitted = [emitted for _, emitted in walk(runs, placement, few, document)]
        assert sum(emitted) == len(ids) - 1 - first
    assert hits > 0, "inconclusive: not one draft matched"


def draft_alone(drafter: BlockDrafter, ids: torch.Tensor, features: torch.Tensor, at: int, drafts: int) -> list[int]:
    rows = drafter.spec.rows(drafts)
    context = drafter.context_kv(features[:at], torch.arange(at))
    attend = DenseBlockAttend(drafter.spec, context, torch.arange(at), torch.tensor([at]))
    block = torch.tensor([[int(ids[at])] + [drafter.spec.mask_token_id] * (rows - 1)])
    with torch.no_grad():
        hidden = drafter.hidden(drafter.embed(block), torch.arange(at, at + rows)[None], attend)
    return draft_greedily(drafter, hidden, ids[at : at + 1], drafts)[0].tolist()


@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_loss_falls_and_acceptance_rises_above_chance(
    target: Decoder, answers: AnswerSet, algorithm: str, tmp_path: Path
) -> None:
    trainer = Trainer(options(tmp_path, algorithm, steps=120), target, answers, quiet())
    held_out = trainer.validation_set
    before = evaluate(target, trainer.drafter, held_out, 4, scale=trainer.scale, row_tokens=64)["all"]
    losses = [float(trainer.train_step()["loss"]) for _ in range(120)]
    trainer.save()
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:5])
    # What lies in the file, its feature scale folded in, drafts like the network in training.
    drafter = load_drafter(tmp_path / "drafter", target, torch.float32)
    after = evaluate(target, drafter, held_out, 4, row_tokens=64)["all"]
    trained = evaluate(target, trainer.drafter, held_out, 4, scale=trainer.scale, row_tokens=64)["all"]
    assert after["mean_accepted_length"] == pytest.approx(trained["mean_accepted_length"], abs=0.03)
    # A fresh drafter with the target's own head repeats the anchor, which is right now and then: that is the level to beat.
    assert after["mean_accepted_length"] > before["mean_accepted_length"] + 0.05
    assert after["survival_by_position"][0] > 5 / VOCAB
    assert after["acceptance_by_position"][1] > 5 / VOCAB


def chain_target() -> Decoder:
    """A target whose next token is mostly the id one up, and now and then what its random layers make of the context.

    Its answers can be learned, and they are no loops: of tokens that come in ascending order few have been there before.
    """
    target = Decoder(dataclasses.replace(tiny().spec, tie_word_embeddings=False)).init_random(3, std=0.1)
    assert target.lm_head is not None
    with torch.no_grad():
        target.embed_tokens.weight.mul_(3.5)
        target.lm_head.weight.copy_(target.embed_tokens.weight.roll(1, 0) * 1.2)
    return target


def ngram_walk(answers: AnswerSet, document: int, drafts: int) -> list[tuple[int, int]]:
    """The steps that n-gram look-up, the drafter that costs nothing, makes over one answer."""
    text = torch.from_numpy(answers.text(document).astype(np.int64))
    first = int(answers.prompt_lengths[document])
    anchors = torch.arange(first, len(text) - 1)
    history = F.pad(text, (0, 1)).int()[None]
    found, _ = lookup(history, torch.zeros_like(anchors), anchors, len(text) - 1, drafts, MAX_MATCH)
    steps, at = [], first
    while at < len(text) - 1:
        wanted = text[at + 1 : at + 1 + drafts]
        run = int((found[at - first, : len(wanted)] == wanted).long().cumprod(0).sum())
        steps.append((run, min(run + 1, len(text) - 1 - at)))
        at += steps[-1][1]
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "steps"), [("dspark", 300), ("dflash", 600)])
def test_a_trained_toy_beats_looking_up(algorithm: str, steps: int, tmp_path: Path) -> None:
    """From a target to a drafter file: the loss falls, and on held-out answers that do not end in a loop each position's
    drafts survive more than twice as often as those of n-gram look-up.
    """
    target, drafts = chain_target(), 4
    generator = SlotGenerator(target, num_slots=64, max_length=64, seed=0)
    made = AnswerSet.from_answers(list(generator.run(jobs(800))), cut_loops=True)
    given = options(tmp_path, algorithm, steps, draft_vocab_size=0, markov_rank=32, num_layers=1)
    trainer = Trainer(with_recipe(given, held_out=64), target, made, quiet())
    trainer.run()
    with (tmp_path / "log.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert np.mean(losses[-3:]) < 0.6 * losses[0]
    held_out = trainer.validation_set
    straight = held_out.select(np.flatnonzero(~held_out.looping))
    assert len(straight) > 40
    looked_up = summarise([ngram_walk(straight, document, drafts) for document in range(len(straight))], drafts)
    assert looked_up.survival_by_position[0] > 0.03, "inconclusive: nothing ever comes back in these answers"
    drafter = load_drafter(tmp_path / "drafter", target, torch.float32)
    drafted = evaluate(target, drafter, straight, drafts, row_tokens=64)["all"]
    for ours, theirs in zip(drafted["survival_by_position"], looked_up.survival_by_position, strict=True):
        assert ours > 2 * theirs
    assert drafted["mean_accepted_length"] > looked_up.mean_accepted_length + 1


@pytest.mark.parametrize("preset", ["slipstream", "deepspec-dspark", "speculators-dflash"])
def test_a_resumed_run_gives_the_weights_of_an_uninterrupted_one(
    target: Decoder, answers: AnswerSet, preset: str, tmp_path: Path
) -> None:
    """Of Muon and AdamW, with noise and without."""
    whole, parts = (
        dataclasses.replace(preset_options(preset, tmp_path / name), steps=12) for name in ("whole", "parts")
    )
    Trainer(whole, target, answers, quiet()).run()
    first = Trainer(parts, target, answers, quiet())
    for _ in range(5):
        first.train_step()
    first.save_checkpoint()
    resumed = dataclasses.replace(parts, resume=True)
    Trainer(resumed, target, answers, quiet()).run()
    ours, theirs = (load_file(folder / "drafter" / "model.safetensors") for folder in (resumed.out, whole.out))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name
    assert (whole.out / "validation.csv").read_text().startswith("step,seconds,length_all,length_no_loops,accepted_1")


def with_recipe(given: TrainOptions, **values: Any) -> TrainOptions:
    return dataclasses.replace(given, recipe=dataclasses.replace(given.recipe, **values))


def preset_options(name: str, out: Path, **recipe: Any) -> TrainOptions:
    """A small run with the losses, anchors and optimiser of a preset, in blocks of eight and four rows or of eight."""
    values = with_preset({"preset": name, "model": "tiny", "out": str(out)})
    chosen = build(TrainOptions, values, "train")
    small = options(out, chosen.algorithm)
    kept = {
        field: getattr(chosen.recipe, field) for field in ("losses", "optim", "anchors", "feature_noise", "schedule")
    }
    return with_recipe(small, **{**kept, **recipe})


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_steps_loss_is_that_of_one_row_after_the_other(
    target: Decoder, answers: AnswerSet, preset: str, tmp_path: Path
) -> None:
    """A batch, written out: each document by itself, each block by itself, each row's terms from their definitions."""
    trainer = Trainer(preset_options(preset, tmp_path), target, answers, quiet())
    with torch.no_grad():  # a fresh confidence head says 0 everywhere, which hides what it is asked about
        for parameter in trainer.drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    rows = trainer.rows.take(torch.arange(3))
    candidates = trainer._candidates(rows)
    last_of_an_answer = rows.scored & ~anchor_candidates(rows)
    assert bool((candidates & last_of_an_answer).any()) == (trainer.recipe.anchors == "scored")
    blocks = draw_blocks(rows, trainer.lengths, 5, candidates)
    loss, terms = trainer.loss(rows, blocks)
    scale, sums, norm = trainer.recipe.losses, dict.fromkeys(("ce", "l1", "kl", "confidence"), 0.0), 0.0
    for row in range(3):
        firsts = [index for index in (blocks.offsets == 0).nonzero()[:, 0].tolist() if blocks.live[row, index]]
        for first in firsts:
            size = int((blocks.block_of_row == blocks.block_of_row[first]).sum())
            parts, weights = block_by_hand(trainer, rows, row, int(blocks.anchors[row, first]), size)
            norm += sum(weights) if scale.normalise == "weights" else sum(weight > 0 for weight in weights)
            for name in sums:
                sums[name] += sum(weight * part[name] for weight, part in zip(weights, parts, strict=True))
    wanted = scale.ce * sums["ce"] + (scale.l1 + scale.tv / 2) * sums["l1"] + scale.kl * sums["kl"]
    wanted += scale.confidence * sums["confidence"]
    assert norm > 50
    assert loss.item() == pytest.approx(wanted / norm, rel=1e-4)
    for name, term in terms.items():
        if name in sums:
            assert float(term) == pytest.approx(sums[name] / norm, rel=1e-4, abs=1e-6), name


def block_by_hand(
    trainer: Trainer, rows: PackedRows, row: int, anchor: int, size: int
) -> tuple[list[dict[str, float]], list[float]]:
    """Terms and weights of a block's rows, 0 for rows that do not count."""
    drafter, target, losses = trainer.drafter, trainer.target, trainer.recipe.losses
    start = int(rows.starts[row, anchor])
    end = start + int((rows.starts[row] == start).sum())
    ids, at = rows.token_ids[row, start:end], anchor - start
    states, features = target(ids, torch.arange(len(ids)), DenseAttend(target.spec), drafter.spec.target_layer_ids)
    teacher = target.logits(states).softmax(-1)
    context = drafter.context_kv(features[:at] * trainer.scale, torch.arange(at))
    attend = DenseBlockAttend(drafter.spec, context, torch.arange(at), torch.tensor([at]))
    block = torch.tensor([[int(ids[at])] + [drafter.spec.mask_token_id] * (size - 1)])
    with torch.no_grad():
        hidden = drafter.hidden(drafter.embed(block), torch.arange(at, at + size)[None], attend)
    parts, weights, reach, factors = [], [], True, []
    for k in range(size):
        before = at + k if drafter.spec.layout == "anchor_first" else at + k - 1
        drafts_before = before - at
        label = before + 1
        scored = drafts_before >= 0 and label < len(ids) and bool(rows.scored[row, start + label])
        reach = reach and (scored or drafts_before < 0)
        counts = scored and (reach or not losses.cumulative_mask)
        parts.append(
            row_by_hand(trainer, hidden[:, k : k + 1], ids, before, teacher) if counts else dict.fromkeys(TERMS, 0.0)
        )
        weights.append(float(np.exp(-drafts_before / losses.gamma)) if counts else 0.0)
        factors.append((1 - losses.alpha) * parts[-1]["q"] + losses.alpha if counts else 1.0)
    if losses.weights == "dpace":
        products = np.cumprod(factors) * (np.array(weights) > 0)
        weights = [float(products[k:].sum()) * (weights[k] > 0) for k in range(size)]
    return parts, weights


TERMS = ("ce", "l1", "kl", "confidence", "q")


@torch.no_grad()
def row_by_hand(
    trainer: Trainer, hidden: torch.Tensor, ids: torch.Tensor, before: int, teacher: torch.Tensor
) -> dict[str, float]:
    """hidden [1, 1, H] of the row that predicts the token after column `before` of a document."""
    drafter, losses, kept = trainer.drafter, trainer.recipe.losses, trainer.kept.tolist()
    logits, previous = drafter.base_logits(hidden), ids[before].view(1, 1)
    if drafter.markov_head is not None:
        logits = logits + drafter.markov_bias(previous, hidden)
    q, t = logits[0, 0].softmax(-1), teacher[before][trainer.kept]
    token = int(ids[before + 1]) if losses.label == "data" else int(teacher[before].argmax())
    of_label = float(q[kept.index(token)]) if token in kept else 0.0
    overlap = float(torch.minimum(q, t).sum())
    missed = 1 - float(t.sum())
    found = {
        "ce": -np.log(of_label) if token in kept else 0.0,
        "l1": float((q - t).abs().sum()) + missed,
        "kl": float((t * (t / (t.sum() * q)).log()).sum()),
        "confidence": 0.0,
        "q": of_label,
    }
    assert found["l1"] == pytest.approx(2 * (1 - overlap), abs=1e-5)
    if drafter.confidence_head is not None:
        c = float(drafter.confidence(hidden, previous).sigmoid())
        found["confidence"] = -(overlap * np.log(c) + (1 - overlap) * np.log(1 - c))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["deepspec-dspark", "speculators-dflash"])
def test_a_step_is_one_graph(target: Decoder, answers: AnswerSet, preset: str, tmp_path: Path) -> None:
    """What is compiled on a GPU reads nothing on the host and does not branch on data: torch traces it in one piece."""
    trainer = Trainer(preset_options(preset, tmp_path), target, answers, quiet())
    plain = trainer.train_step()["loss"]
    again = Trainer(preset_options(preset, tmp_path), target, answers, quiet())
    again.row_losses = torch.compile(again._row_losses, dynamic=False, fullgraph=True, backend="aot_eager")
    assert float(again.train_step()["loss"]) == pytest.approx(float(plain), rel=1e-4)


def test_noise_is_the_steps_own(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    """Noise of the asked deviation in each column's own unit; equal for equal seeds and steps, else not."""
    trainer = Trainer(with_recipe(options(tmp_path), feature_noise=0.2), target, answers, quiet())
    rows = trainer.rows.take(torch.arange(8))
    first, again, other = (trainer._feature_noise(rows, seed) for seed in (3, 3, 4))
    assert first is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    deviation = (first * trainer.scale).flatten(0, 1).std(dim=0)
    torch.testing.assert_close(deviation, torch.full_like(deviation, 0.2), atol=0.05, rtol=0)  # 512 draws: 8 deviations
    quiet_run = Trainer(options(tmp_path), target, answers, quiet())
    assert float(trainer.train_step()["loss"]) != float(quiet_run.train_step()["loss"])


def test_resuming_something_else_is_refused(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        Trainer(options(tmp_path, steps=4, resume=True), target, answers, quiet()).run()
    Trainer(options(tmp_path, steps=1), target, answers, quiet()).run()
    with pytest.raises(ConfigError, match="seed is 1"):
        Trainer(options(tmp_path, steps=1, resume=True, seed=1), target, answers, quiet()).run()


def test_loops_are_cut() -> None:
    straight, loop = list(range(30)), [91, 92, 93, 94]
    job = Job(prompt_ids=(5, 6), temperature=0.0, max_new_tokens=99)
    answer = Answer(job=job, token_ids=tuple(straight + loop * 8), finished=False)
    cut = AnswerSet.from_answers([answer], cut_loops=True)
    assert cut.answer(0).tolist() == straight + loop * 2
    assert cut.looping.tolist() == [True]
    assert len(AnswerSet.from_answers([answer], cut_loops=False).answer(0)) == 62


def test_answers_survive_the_file(answers: AnswerSet, tmp_path: Path) -> None:
    answers.save(tmp_path / "a.safetensors")
    again = AnswerSet.load(tmp_path / "a.safetensors")
    assert len(again) == len(answers)
    for field in ("token_ids", "starts", "prompt_lengths", "temperatures", "looping"):
        np.testing.assert_array_equal(getattr(again, field), getattr(answers, field))
    joined = AnswerSet.join([answers, again])
    assert joined.answer(len(answers)).tolist() == answers.answer(0).tolist()


class LetterTokenizer:
    """One id per letter, 3 and 4 for the turns of a chat; every other id is a dot."""

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        return [{"<": 3, ">": 4}.get(char, 10 + ord(char.lower()) % 80) for char in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("." if each < 10 else chr(97 + each % 26) for each in ids)

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return f"<{messages[0]['content']}>"


def test_given_and_self_made_prompts_are_answered(target: Decoder) -> None:
    prompts = ["add two", "halve\u2028it"]
    generator = SlotGenerator(target, num_slots=16, max_length=100, seed=0)
    tokenizer = LetterTokenizer()
    found = generate_answers(
        generator, tokenizer, prompts, num_tokens=600, max_new_tokens=24, greedy_share=0.5, sampled_temperature=0.75,
        mix=(1, 1, 1), seed=0,
    )  # fmt: skip
    assert found.num_answer_tokens > 400
    for prompt in prompts:
        asked = tokenizer.encode(f"<{prompt}>")
        temperatures = [
            float(found.temperatures[index])
            for index in range(len(found))
            if found.text(index)[: found.prompt_lengths[index]].tolist() == asked
        ]
        assert sorted(temperatures) == [0.0, 0.75]
    assert set(found.temperatures.tolist()) == {0.0, 0.75}
    assert len(found) > 10, "no self-made prompt was answered"
    evaluated = greedy_answers(generator, tokenizer, {"a": prompts, "b": ["one"]}, 8)
    assert [len(evaluated[name]) for name in ("a", "b")] == [2, 1]


def test_bad_answer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        AnswerSet.load(tmp_path / "a.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\x09\0\0")
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        AnswerSet.load(tmp_path / "cut.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dspark", "dflash"])
def test_several_processes_train_as_one(target: Decoder, answers: AnswerSet, algorithm: str, tmp_path: Path) -> None:
    """Two processes that share every batch end with one process's weights, up to the order of sums.

    DFlash with weights that are known after the forward only, and noise.
    """
    losses = LossOptions(ce=1.0, l1=0.0, confidence=0.0, weights="dpace", normalise="rows", label="teacher")
    changes: dict[str, Any] = {"losses": losses, "feature_noise": 0.1} if algorithm == "dflash" else {}
    alone = Trainer(with_recipe(options(tmp_path / "one", algorithm, steps=6), **changes), target, answers, quiet())
    expected = [float(alone.train_step()["loss"]) for _ in range(6)]
    answers.save(tmp_path / "answers.safetensors")
    shared = with_recipe(options(tmp_path / "two", algorithm, steps=6, processes=2), **changes)
    launch(2, False, shared_run, shared, tmp_path, expected)
    together = load_file(tmp_path / "weights.safetensors")
    for name, master in alone.optimizer.masters.items():
        torch.testing.assert_close(together[name], master, atol=2e-5, rtol=1e-4, msg=name)


def shared_run(given: TrainOptions, folder: Path, losses: list[float], ranks: Ranks) -> None:
    """What each of the processes does; its own losses are a share of the whole."""
    trainer = Trainer(given, tiny(), AnswerSet.load(folder / "answers.safetensors"), quiet(), ranks)
    for whole in losses:
        share = trainer.train_step()["loss"]
        assert float(share) < whole
        ranks.add_up([share])
        assert float(share) == pytest.approx(whole, rel=1e-4)
    if ranks.leads:
        save_file(trainer.optimizer.masters, folder / "weights.safetensors")


def test_processes_that_fail_say_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"2 training processes failed.*rank 1 stumbles"):
        launch(2, False, stumble)


def stumble(ranks: Ranks) -> None:
    assert ranks.leads, f"rank {ranks.rank} stumbles"


def test_a_trained_drafter_can_be_gone_on_from(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    """The first loss is where the finished run stood, not that of random weights; another shape is refused."""
    first = Trainer(options(tmp_path / "first", steps=60), target, answers, quiet())
    fresh = float(first.train_step()["loss"])
    first.run()
    drafter = load_drafter(tmp_path / "first" / "drafter", target, torch.float32)
    onward = Trainer(options(tmp_path / "onward"), target, answers, quiet(), start=drafter)
    assert torch.equal(onward.kept, first.kept)
    assert float(onward.train_step()["loss"]) < 0.9 * fresh
    with pytest.raises(ConfigError, match="init: its markov_rank is 8, this run asks for 4"):
        Trainer(options(tmp_path / "other", markov_rank=4), target, answers, quiet(), start=drafter)


def test_a_run_leaves_a_picture(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    Trainer(options(tmp_path, steps=9), target, answers, quiet()).run()
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("window", [None, 9])
def test_skipped_tiles_hold_nothing(answers: AnswerSet, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile in which the whole mask shows a key is among those that FlexAttention is told to look into."""
    monkeypatch.setattr("slipstream.train.attend.TILE", 16)  # many tiles in small rows
    windows = {} if window is None else {"sliding_window": window, "layer_types": ("sliding_attention",) * 4}
    decoder = Decoder(dataclasses.replace(tiny().spec, **windows))
    rows = pack(answers, 60)[0].take(torch.arange(3))  # no multiple of a tile
    blocks = draw_blocks(rows, [4, 7, 7, 4, 4, 7, 7], seed=1)
    for visible, looked_into in (
        tuple(PackedAttend(decoder, rows, backend).masks[window] for backend in (Dense(), Flex())),
        tuple(packed_block_mask(rows, blocks, backend) for backend in (Dense(), Flex())),
    ):
        tiles = looked_into.to_dense()
        padded = F.pad(visible, (0, -visible.shape[-1] % 16, 0, -visible.shape[-2] % 16))
        seen = padded.unflatten(-1, (-1, 16)).unflatten(-3, (-1, 16)).any(dim=-1).any(dim=-2)
        assert (tiles.bool() | ~seen).all()
        assert tiles.float().mean() < 0.8, "inconclusive: hardly anything is skipped"


@pytest.mark.slow
def test_old_logs_are_no_part_of_a_new_run(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    """A new run in an old folder begins new files; a resumed one keeps what its checkpoint knows and repeats the rest."""
    Trainer(options(tmp_path, steps=40), target, answers, quiet()).run()
    assert [row["step"] for row in read_csv(tmp_path / "log.csv")] == ["20", "40"]
    Trainer(options(tmp_path, steps=20), target, answers, quiet()).run()
    assert [row["step"] for row in read_csv(tmp_path / "log.csv")] == ["20"]
    cut = Trainer(options(tmp_path, steps=20), target, answers, quiet())
    for _ in range(10):
        cut.train_step()
    cut.save_checkpoint()
    RunLog(tmp_path, quiet()).losses(15, 1.0, {"loss": 1.0}, [0.5])  # logged, and lost with the cut
    Trainer(options(tmp_path, steps=20, resume=True), target, answers, quiet()).run()
    assert [row["step"] for row in read_csv(tmp_path / "log.csv")] == ["20"]
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    Trainer(options(tmp_path, steps=20, resume=True), target, answers, quiet()).run()
    assert whole == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}, "it was done"


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_answers_made_otherwise_are_not_taken(target: Decoder, tmp_path: Path) -> None:
    """What lies in OUT is reused by the run that made it, and by no other."""
    asked = options(tmp_path, answer_tokens=200, recipe=Recipe(max_length=60, max_new_tokens=16, num_slots=8))
    made = load_or_generate(asked, target, LetterTokenizer, quiet())
    again = load_or_generate(asked, target, refuse_to_generate, quiet())
    assert np.array_equal(made.token_ids, again.token_ids)
    for changed, message in (
        (dataclasses.replace(asked, answer_tokens=300), "answer_tokens is 300.*were made with 200"),
        (dataclasses.replace(asked, recipe=Recipe(max_length=60, max_new_tokens=9)), "recipe.max_new_tokens is 9"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_or_generate(changed, target, refuse_to_generate, quiet())
    (tmp_path / "answers.json").unlink()
    with pytest.raises(ConfigError, match=r"answers\.json should say"):
        load_or_generate(asked, target, refuse_to_generate, quiet())


def refuse_to_generate() -> LetterTokenizer:
    raise AssertionError("answers that were there are generated again")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": (Path("a"),), "answer_tokens": 5}, "answer_tokens: no effect with answers"),
        ({"resume": True, "init": "x"}, "init: no effect with resume"),
        ({"algorithm": "dflash", "markov_rank": 5}, "markov_rank: no effect with dflash"),
        ({"recipe": Recipe(losses=LossOptions(alpha=0.3))}, "alpha: no effect with weights 'exponential'"),
        ({"recipe": Recipe(short_share=0.3)}, "short_share: no effect without short_block"),
    ],
)
def test_options_without_effect_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(model="tiny", out=tmp_path, **changes)
