"""`slipstream train` used wrongly, or with broken files: refused by field or by file, and nothing good is lost."""

import dataclasses
import io
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.numpy import load_file, save_file

from slipstream.errors import CheckpointError, ConfigError, EngineError
from slipstream.models.decoder import Decoder
from slipstream.train.answers import AnswerSet, SlotGenerator
from slipstream.train.options import LossOptions, OptimOptions, Recipe, TrainOptions
from slipstream.train.parallel import Ranks, launch
from slipstream.train.run import load_or_generate, train
from slipstream.train.trainer import Trainer
from slipstream.train.walks import evaluate
from tests.e2e.test_train import LetterTokenizer, jobs, options, quiet, tiny, with_recipe


@pytest.fixture(scope="module")
def target() -> Decoder:
    return tiny()


@pytest.fixture(scope="module")
def answers(target: Decoder) -> AnswerSet:
    generator = SlotGenerator(target, num_slots=32, max_length=64, seed=0)
    return AnswerSet.from_answers(list(generator.run(jobs(60))), cut_loops=True)


def test_a_diverged_run_leaves_the_last_good_drafter(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    """Neither files that a step has spoilt, nor a good end: the first bad step is named."""
    Trainer(options(tmp_path, steps=3), target, answers, quiet()).run()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".json", ".safetensors")}
    assert len(kept) == 4
    wild = with_recipe(options(tmp_path, steps=30), optim=OptimOptions(muon_lr=1e36, adam_lr=1e36, clip=0.0))
    with pytest.raises(EngineError, match=r"step [1-4]: .*not finite.*lower recipe.optim.muon_lr"):
        Trainer(wild, target, answers, quiet()).run()
    assert {path: path.read_bytes() for path in kept} == kept


def test_the_first_bad_step_is_named(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    trainer = Trainer(options(tmp_path), target, answers, quiet())
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    with torch.no_grad():
        next(iter(trainer.optimizer.parameters.values())).fill_(float("nan"))
    for _ in range(3):
        trainer.train_step()
    with pytest.raises(EngineError, match="step 3: "):
        trainer.save()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: OptimOptions(muon_lr=math.inf), "optim.muon_lr is inf; it must be finite and at least 0"),
        (lambda: LossOptions(ce=math.nan), "losses.ce is nan; it must be finite"),
        (lambda: OptimOptions(betas=(0.9, 1.0)), r"optim.betas is \[0.9, 1.0\]; every number in it must be .* below 1"),
        (lambda: OptimOptions(betas=(0.9,)), r"optim.betas is \[0.9\]; give two"),  # type: ignore[arg-type]
        (lambda: OptimOptions(momentum=1.0), "optim.momentum is 1.0"),
        (lambda: OptimOptions(clip=-1.0), "optim.clip is -1.0"),
        (lambda: Recipe(warmup=1.0), "recipe.warmup is 1.0; it must be at least 0 and below 1"),
        (lambda: Recipe(row_tokens=1), "recipe.row_tokens is 1; it must be at least 2"),
        (lambda: Recipe(batch_rows=0), "recipe.batch_rows is 0; it must be at least 1"),
        (lambda: Recipe(block_rows=0), "recipe.block_rows"),
        (lambda: Recipe(num_slots=0), "recipe.num_slots"),
        (lambda: Recipe(max_new_tokens=3), "recipe.max_new_tokens is 3; it must be at least 4"),
        (lambda: Recipe(max_length=8), "recipe.max_length is 8"),
        (lambda: Recipe(held_out=-1), "recipe.held_out"),
        (lambda: Recipe(intermediate_size=0), "recipe.intermediate_size"),
        (lambda: Recipe(short_share=1.5), "recipe.short_share is 1.5; it must be at least 0 and at most 1"),
        (lambda: Recipe(greedy_share=-0.1), "recipe.greedy_share"),
        (lambda: Recipe(mix=(1.0, math.nan, 0.0)), r"recipe.mix is \[1.0, nan, 0.0\]; every number in it"),
        (lambda: Recipe(mix=(1.0, 1.0)), "recipe.mix .* three shares"),  # type: ignore[arg-type]
        (lambda: Recipe(target_layer_ids=(-1,)), "recipe.target_layer_ids"),
        (lambda: TrainOptions(model="t", out=Path("o"), minutes=math.inf), "minutes is inf; it must be finite"),
        (lambda: TrainOptions(model="t", out=Path("o"), seed=-1), "seed is -1; it must be at least 0 and at most 4294967295"),
        (lambda: TrainOptions(model="t", out=Path("o"), seed=2**32), "seed is 4294967296"),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_named(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_size": 129}, "block_size is 129, the target has 128 positions"),
        ({"mask_token_id": 96}, "recipe.mask_token_id is 96; the target's tokens end at 95"),
        ({"target_layer_ids": (0, 4)}, "recipe.target_layer_ids .* layers end at 3"),
        ({"row_tokens": 2}, "recipe.row_tokens is 2: .*raise it"),
    ],
)
def test_what_the_target_or_the_answers_lack_is_named(
    target: Decoder, answers: AnswerSet, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    sizes = {name: value for name, value in changes.items() if name == "block_size"}
    recipe = {name: value for name, value in changes.items() if name != "block_size"}
    with pytest.raises(ConfigError, match=says):
        Trainer(with_recipe(options(tmp_path, **sizes), **recipe), target, answers, quiet())


def test_answers_that_are_cut_are_counted(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    """And validation passes over those that end before their answer begins."""
    console = Console(record=True, width=400, file=io.StringIO())
    trainer = Trainer(with_recipe(options(tmp_path), row_tokens=16), target, answers, console)
    too_long = int((np.diff(trainer.training_set.starts) > 16).sum())
    assert too_long > 0
    assert f"{too_long} of {len(trainer.training_set)} answers are cut at row_tokens 16" in console.export_text()
    report = evaluate(target, trainer.drafter, answers.select([0, 1]), 4, scale=trainer.scale, row_tokens=2)
    assert report["all"]["num_steps"] == 0


def test_no_answers_are_not_kept(target: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the error advises can be done in the same folder."""
    asked = options(tmp_path, answer_tokens=50, recipe=Recipe(max_length=60, max_new_tokens=4, num_slots=8))
    monkeypatch.setattr("slipstream.train.answers.MIN_ANSWER_TOKENS", 5)
    with pytest.raises(ConfigError, match=r"none of the target's \d+ answers.*raise recipe.max_new_tokens"):
        load_or_generate(asked, target, LetterTokenizer, quiet())
    assert not list(tmp_path.iterdir())


def spoilt(answers: AnswerSet, path: Path, **changes: Any) -> Path:
    answers.save(path)
    arrays = {**load_file(path), **changes}
    save_file({name: array for name, array in arrays.items() if array is not None}, path)
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"looping": None}, "looping is missing"),
        ({"token_ids": np.zeros(9, np.float32)}, r"token_ids is float32 \[9\]"),
        ({"token_ids": np.zeros((3, 3), np.int32)}, r"token_ids is int32 \[3, 3\]"),
        ({"token_ids": np.zeros(9, np.int32)}, "starts does not go from 0 to 9"),
        ({"starts": np.arange(4)}, "starts does not go"),
        ({"prompt_lengths": np.zeros(0, np.int32)}, "prompt_lengths is empty"),
        ({"prompt_lengths": 0}, "prompt_lengths leaves no prompt"),
        ({"prompt_lengths": 64}, "prompt_lengths leaves no prompt or no answer"),
        ({"temperatures": np.ones(2, np.float32)}, "temperatures has 2 values"),
        ({"temperatures": math.nan}, "temperatures holds one"),
        ({"token_ids": -1}, "token_ids holds -1"),
        ({"token_ids": 96}, "token_ids holds 96, the target's tokens end at 95; name answers of this target"),
    ],
)
def test_broken_answers_are_named(
    target: Decoder, answers: AnswerSet, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """By file and field. A number stands for a field that is full of it."""
    filled = {
        name: np.full_like(getattr(answers, name), value) if isinstance(value, int | float) else value
        for name, value in changes.items()
    }
    path = spoilt(answers, tmp_path / "mine.safetensors", **filled)
    with pytest.raises(CheckpointError, match=rf"mine\.safetensors: {says}") as caught:
        load_or_generate(options(tmp_path, answers=(path,)), target, LetterTokenizer, quiet())
    assert "delete" not in str(caught.value)


def test_broken_answers_of_the_run_may_be_deleted(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    asked = options(tmp_path)
    spoilt(answers, tmp_path / "answers.safetensors", looping=None)
    (tmp_path / "answers.json").write_text(json.dumps(asked.made_by()))
    with pytest.raises(CheckpointError, match=r"answers\.safetensors: looping is missing; delete it"):
        load_or_generate(asked, target, LetterTokenizer, quiet())


def test_other_answers_are_no_resumption(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    """The same texts in another order are others: batches would differ. A run that does not say is believed."""
    Trainer(options(tmp_path, steps=1), target, answers, quiet()).run()
    resumed = options(tmp_path, steps=1, resume=True)
    turned = answers.select(np.arange(len(answers))[::-1])
    with pytest.raises(ConfigError, match=r"answers: these are not the ones.*same order"):
        Trainer(resumed, target, turned, quiet()).run()
    Trainer(resumed, target, AnswerSet.join([answers]), quiet()).run()
    change_state(tmp_path, answers=None)
    Trainer(resumed, target, answers, quiet()).run()


def change_state(out: Path, **changes: Any) -> None:
    path = out / "checkpoint" / "state.json"
    state = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in state.items() if value is not None}))


@pytest.mark.parametrize(
    "changes", [{"step": "9"}, {"step": None}, {"seconds": []}, {"tensors": 3}, {"options": []}, {"options": None}]
)
def test_a_state_of_other_types_is_named(
    target: Decoder, answers: AnswerSet, changes: dict[str, Any], tmp_path: Path
) -> None:
    trainer = Trainer(options(tmp_path, resume=True), target, answers, quiet())
    trainer.save_checkpoint()
    change_state(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=rf"state\.json has no {next(iter(changes))}"):
        trainer.load_checkpoint()
    (tmp_path / "checkpoint" / "state.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"state\.json has no step"):
        trainer.load_checkpoint()


@pytest.mark.parametrize(("replaced", "says"), [(None, "missing"), (np.zeros(3, np.float32), r"torch.float32 \[3\]")])
def test_checkpoint_tensors_must_fit(
    target: Decoder, answers: AnswerSet, replaced: Any, says: str, tmp_path: Path
) -> None:
    trainer = Trainer(options(tmp_path, resume=True), target, answers, quiet())
    trainer.save_checkpoint()
    path = tmp_path / "checkpoint" / "step-0000000.safetensors"
    arrays = {**load_file(path), "first.fc.weight": replaced}
    save_file({name: array for name, array in arrays.items() if array is not None}, path)
    with pytest.raises(CheckpointError, match=rf"step-0000000\.safetensors: first\.fc\.weight is {says}"):
        trainer.load_checkpoint()


@pytest.mark.parametrize("device", ["tpu", "meta", "", "cuda:x"])
def test_devices_are_checked(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"device is {device!r}; choose auto, cpu or cuda"):
        train(options(tmp_path, device=device), quiet())


def test_out_is_made_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out: the folder .* cannot be made"):
        train(dataclasses.replace(options(tmp_path / "file" / "run"), model="no such model"), quiet())


def test_a_calibration_of_earlier_weights_goes(target: Decoder, answers: AnswerSet, tmp_path: Path) -> None:
    console = Console(record=True, width=400, file=io.StringIO())
    trainer = Trainer(options(tmp_path), target, answers, console)
    trainer.save()
    stale = tmp_path / "drafter" / "calibration.json"
    stale.write_text("{}")
    trainer.save()
    assert not stale.exists()
    assert "calibration.json was fitted to earlier weights and is removed" in console.export_text()


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored, and processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("refuse", ConfigError, "^steps: rank 1 says so$"),
        ("kill", EngineError, "2 training processes failed.*SIGKILL.*lower recipe.batch_rows"),
        ("interrupt", EngineError, "it was interrupted"),
        ("interrupt the leader", KeyboardInterrupt, "^$"),
    ],
)
def test_one_process_ends_all(how: str, kind: type[BaseException], says: str) -> None:
    """Long before the other would have ended, with the error of the one."""
    started = time.monotonic()
    with pytest.raises(kind, match=says):
        launch(2, False, misbehave, how)
    assert time.monotonic() - started < 200
    for process in multiprocessing.active_children():
        process.join(10)
    assert not multiprocessing.active_children()


def misbehave(how: str, ranks: Ranks) -> None:
    if ranks.leads:
        time.sleep(300)
    if how == "refuse":
        raise ConfigError("steps: rank 1 says so")
    where, what = {
        "kill": (os.getpid(), signal.SIGKILL),
        "interrupt": (os.getpid(), signal.SIGINT),
        "interrupt the leader": (os.getppid(), signal.SIGINT),
    }[how]
    os.kill(where, what)
    time.sleep(300)
