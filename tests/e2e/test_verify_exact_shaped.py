"""`slipstream verify-exact` under penalties, biases and a grammar: it clears the right engine and finds the wrong ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import engine
from slipstream.config import SamplingParams
from slipstream.constraint import Constraint
from slipstream.lab import verify_exact as exact
from slipstream.lab.verify_exact_law import laws
from slipstream.lab.verify_exact_options import ExactOptions
from slipstream.lab.verify_exact_shape import Shape
from slipstream.llm import LLM
from slipstream.ops import shape_logits
from tests.e2e.exact_faults import PROMPTS, VOCAB, near_target, prompts_file, start, tiny
from tests.e2e.grammars import ANY, EOS, allowed_after, automaton, grammars
from tests.e2e.test_verify_exact import command
from tests.lossless.shaping import plain_law

SHAPES: dict[str, dict[str, Any]] = {
    "penalties": {
        "repetition_penalty": 1.5, "frequency_penalty": 2, "presence_penalty": 2, "logit_bias": {5: 1.5, 7: -3}, "ignore_eos": True,
    },
    "grammar": {"structured": ANY, "min_p": 0.01},
    "both": {"structured": ANY, "repetition_penalty": 1.5, "frequency_penalty": 2, "top_p": 0.95},
}  # fmt: skip


def report_under(name: str, samples: int = 150, **fields: Any) -> dict[str, Any]:
    """Of a pair that mostly agrees, for a fault behind an accepted draft shows only where there is one."""
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=0, **SHAPES[name])
    with prompts_file(*PROMPTS) as path:
        options = ExactOptions(
            model="tiny", draft="tiny", prompts=path, requests=len(PROMPTS), samples=samples, positions=(1, 3),
            concurrency=16, sampling=params, **{"modes": ("random",), **fields},
        )  # fmt: skip

        def begin(mode: str, rule: str) -> LLM:
            return start(tiny(), options, mode, rule, drafter=near_target())

        return exact.verify(tiny(), options, begin=begin, grammars=grammars(VOCAB))


@pytest.mark.parametrize(
    "name", ["grammar", *(pytest.param(name, marks=pytest.mark.slow) for name in ("penalties", "both"))]
)
def test_the_right_engine_is_exact(name: str) -> None:
    report = report_under(name)
    assert report["verdict"] == "exact", [(c["check"], c["mode"], c["why"]) for c in report["checks"] if c["why"]]
    laws_found = [check for check in report["checks"] if check["check"] == "law"]
    assert len(laws_found) == 3 and all(test["samples"] > 100 for check in laws_found for test in check["tests"])
    shape = json.loads(json.dumps(report["conditions"]["shape"]))
    assert shape.keys() == SHAPES[name].keys() - {"min_p", "top_p", "ignore_eos"}


def blind_to_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties count what is committed alone."""
    right = shape_logits._tokens_before

    def wrong(histories: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, is_before = right(histories)
        is_before[:, histories.num_columns :] = False
        return tokens, is_before

    monkeypatch.setattr(shape_logits, "_tokens_before", wrong)


def first_mask_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that do not follow the drafts."""
    fill = Constraint.fill

    def wrong(self: Constraint, drafts: Any, masks_np: Any) -> Any:
        reason = fill(self, [], masks_np)
        masks_np[:] = masks_np[0]
        return reason

    monkeypatch.setattr(Constraint, "fill", wrong)


def test_a_wish_that_no_text_hangs_on_is_inconclusive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A penalty that changes no choice says nothing of whether it sees drafts."""
    report = report_under("penalties", modes=("static",), samples=20)
    texts = [check for check in report["checks"] if check["check"] != "law"]
    assert len(texts) == 3 and all(check["hangs"] > 0 for check in texts)
    monkeypatch.setitem(SHAPES, "next to nothing", {"presence_penalty": 1e-9, "ignore_eos": True})
    report = report_under("next to nothing", modes=("static",), samples=20)
    texts = [check for check in report["checks"] if check["check"] != "law"]
    assert [(check["hangs"], check["verdict"]) for check in texts] == [(0, "inconclusive")] * 3
    assert any("--requests" in check["why"] for check in texts), "one rejects drafts as well"
    monkeypatch.setitem(SHAPES, "bias", {"logit_bias": {5: 1.5}, "ignore_eos": True})
    assert all("hangs" not in check for check in report_under("bias", modes=("static",), samples=20)["checks"])


def no_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "struck", lambda batch, logits, masks: logits)


FAULTS: list[Any] = [
    (blind_to_drafts, "penalties"), (first_mask_everywhere, "grammar"), pytest.param(first_mask_everywhere, "both", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("rule", ["coupled", pytest.param("rejection", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fault", "name"), FAULTS)
def test_wrong_engines_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    report = report_under(name, rules=(rule,), modes=("static",))
    found = {check["check"]: check["verdict"] for check in report["checks"] if check["mode"] == "static"}
    assert report["verdict"] == found["greedy"] == found["seeded" if rule == "coupled" else "law"] == "differs"
    plain = next(check for check in report["checks"] if check["mode"] == "off")
    assert plain["verdict"] != "differs"


def test_answers_without_their_form_are_found_whoever_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that nobody applies is the same in all modes: comparing them says nothing."""
    no_masks(monkeypatch)
    monkeypatch.setattr(Constraint, "read", lambda self, tokens: None)
    report = report_under("grammar", rules=("rejection",), modes=("static",), samples=20)
    assert [check["verdict"] for check in report["checks"]] == ["differs"] * 3
    assert all("have not the form" in check["why"] for check in report["checks"])


def test_laws_are_those_of_the_definition() -> None:
    models, hidden = tiny(), torch.randn(3, 32)
    logits = models.target.logits(hidden)[:, :VOCAB].float()
    prompt, outputs = [3, 7, 4, 6], [[], [2, 5], [2, 6, 2]]
    for fields in (
        SHAPES["penalties"],
        {"structured": ANY},
        {**SHAPES["both"], "presence_penalty": -1, "logit_bias": {5: 2}, "top_k": 6},
    ):
        params = SamplingParams(temperature=0.8, **fields)
        law = laws(models, hidden, params, Shape(models, params, grammars(VOCAB)), prompt, outputs)
        for row, output in enumerate(outputs):
            given = logits[row]
            if params.structured is not None:
                given = given.masked_fill(~torch.from_numpy(allowed_after(output, VOCAB)), -torch.inf)
            torch.testing.assert_close(law[row], plain_law(given, prompt, output, params).softmax(-1)[0])


def test_a_form_is_broken_by_any_token_of_an_answer() -> None:
    shape = Shape(tiny(), SamplingParams(structured=ANY), grammars(VOCAB))
    after = automaton(VOCAB)
    first = next(token for token in range(2, VOCAB) if after[0, token] >= 0)
    forbidden = next(token for token in range(2, VOCAB) if after[0, token] < 0)
    assert not shape.breaks([]) and not shape.breaks([first])
    assert shape.breaks([forbidden]) and shape.breaks([EOS]), "it is not complete yet"
    assert not Shape(tiny(), SamplingParams()).breaks([forbidden])


def test_the_command_takes_them_from_a_file(
    capsys: pytest.CaptureFixture[str], tiny_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    path = tmp_path / "asked.json"
    path.write_text(json.dumps({"repetition_penalty": 1.2, "logit_bias": {"97": 2}}))
    with prompts_file("hello", "good day") as prompts:
        small = ["--model", tiny_folders[0], "--draft", tiny_folders[1], "--prompts", prompts, "--modes", "static"]
        small += [
            "--acceptance",
            "coupled",
            "--positions",
            1,
            "--samples",
            30,
            "--requests",
            2,
            "--max-tokens",
            8,
            "--json",
        ]
        _, out, _ = command(capsys, *small, "--config", path)
    report = json.loads(out)
    assert report["conditions"]["shape"] == {"repetition_penalty": 1.2, "logit_bias": {"97": 2.0}}
    assert report["verdict"] != "differs"
