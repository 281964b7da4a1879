"""`slipstream verify-exact`: it finds every engine that is wrong on purpose, clears the right one, and knows its odds."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.cli import main
from slipstream.config import SamplingParams
from slipstream.decide.policy import FullWidth
from slipstream.errors import ConfigError
from slipstream.lab import verify_exact as exact
from slipstream.lab.verify_exact_choice import hangs_on_drafts, perturbed_gap
from slipstream.lab.verify_exact_law import Counts, chi_square_tail, force, laws, visible
from slipstream.lab.verify_exact_options import EXACT_MODES, ExactOptions
from slipstream.lab.verify_exact_shape import Shape
from slipstream.metrics import SpecCounters
from slipstream.models.layers import DenseAttend
from slipstream.testing import TableDrafter, tiny_models, tiny_spec
from tests.e2e.engines import models_with
from tests.e2e.exact_faults import FAULTS, adaptive, cliff, found, prompts_file, report_of
from tests.lossless import harness

SLOW = {"best of all budgets of this step's `head`", "budget handed out by this step's `drawn`"}
TEXTS = ("t3 t4 t3 t9", "t5 t7", "t6 t6 t8", "t9 t11 t12 t2")
LAW = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=0)


@pytest.fixture
def options() -> Any:
    with prompts_file(*TEXTS) as path:

        def make(**fields: Any) -> ExactOptions:
            given = {"model": "tiny", "draft": "tiny", "prompts": path, "requests": len(TEXTS), "samples": 150}
            return ExactOptions(**{**given, "positions": (1, 2, 5), "concurrency": 16, "sampling": LAW, **fields})

        yield make


Make = Callable[..., ExactOptions]

# -------------------------------------------------------------------------------------------------- right and wrong


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in FAULTS])
def test_every_fault_is_found(name: str) -> None:
    fault = FAULTS[name]
    report = report_of(fault, fault.samples)
    check = found(fault, report)
    assert check["verdict"] == report["verdict"] == "differs", check["why"]
    if fault.check == "law":
        assert max(test["bias"] / test["chance"] for test in check["tests"]) > 1.5
    else:
        assert check["equal"] < check["requests"]


@pytest.mark.slow
def test_what_makes_a_fault_is_the_fault() -> None:
    """The policies of two faults are exact with noise that is not reused, and with a rule that looks at no later draft."""
    lag, best = (
        FAULTS["draft noise keyed by position alone, under lag"],
        FAULTS["best of all budgets of this step's `head`"],
    )
    causal = replace(best, policy=lambda count: adaptive("head", cost=cliff(count), causal=True))
    for fault, right in ((lag, True), (causal, False)):
        report = report_of(fault, fault.samples, right=right)
        assert found(fault, report)["verdict"] != "differs"
        assert min(t["p_value"] for t in found(fault, report)["tests"]) > 1e-3


def test_the_engine_is_exact_in_every_mode(options: Make) -> None:
    done = []
    report = exact.verify(models_with("dspark"), options(), advance=lambda *count: done.append(count))
    assert report["verdict"] == "exact", [check for check in report["checks"] if check["verdict"] != "exact"]
    rows = {(check["check"], check["acceptance"], check["mode"]): check for check in report["checks"]}
    texts = {("greedy", "coupled"), ("seeded", "coupled"), ("greedy", "rejection")}
    assert rows.keys() == {(*kind, mode) for kind in (*texts, ("law", "rejection")) for mode in EXACT_MODES} | {
        ("law", "coupled", "off"), ("law", "rejection", "off"),
    }  # fmt: skip
    for (check, _, mode), row in rows.items():
        if mode != "off":
            assert min(row["drafted"], row["accepted"], row["rejected"]) > 0
            assert (row["pruned"] == 0) == (mode == "static")
        if check == "law":
            assert [test["where"] for test in row["tests"]] == ["token 1", "token 2", "token 5", "ranks"]
    json.dumps(report, allow_nan=False)
    assert report["conditions"]["tests"] == 7 * 4
    assert done[-1][0] == done[-1][1]


@pytest.mark.parametrize(
    ("mode", "policy", "missing"),
    [
        ("lag", lambda: FullWidth(7), "pruned"),
        ("static", lambda: FullWidth(0), "drafted, accepted, rejected"),
    ],
)
def test_fault_15_nothing_happened(options: Make, mode: str, policy: Callable[[], FullWidth], missing: str) -> None:
    models, given = models_with("dspark"), options(modes=(mode,), rules=("coupled",), samples=20)

    def begin(mode: str, rule: str) -> Any:
        return exact.start(models, given, mode, rule, policy=None if mode == "off" else policy())

    report = exact.verify(models, given, begin=begin)
    seeded = next(check for check in report["checks"] if check["check"] == "seeded")
    assert (seeded["verdict"], report["verdict"]) == ("inconclusive", "inconclusive")
    assert seeded["why"].startswith(f"{missing} 0:")


def test_fault_15_a_drafter_that_is_never_right(options: Make) -> None:
    models, given = models_with(), options(modes=("static",), rules=("coupled",), samples=20)
    plan = exact.Plan(given, models, exact.prompts_of(models, given))
    llm = exact.start(models, given, "off", "coupled")
    answers = [c.token_ids for c in llm.generate(list(plan.prompts), plan.greedy())]
    whole = [(*prompt, *text) for prompt, text in zip(plan.prompts, answers, strict=True)]
    pairs = {pair for text in whole for pair in itertools.pairwise(text)}
    table = [next(b for b in range(20) if (a, b) not in pairs) for a in range(20)]

    def begin(mode: str, rule: str) -> Any:
        return exact.start(models, given, mode, rule, drafter=TableDrafter(table, 7))

    greedy = next(c for c in exact.verify(models, given, begin=begin)["checks"] if c["check"] == "greedy")
    assert greedy["verdict"] == "inconclusive"
    assert greedy["accepted"] == 0 < greedy["rejected"]


def test_the_end_of_an_answer_prunes_nothing(options: Make) -> None:
    """Drafts that the end cut off were verified by nobody and rejected by nobody."""
    report = exact.verify(models_with("dspark"), options(modes=("static",), rules=("coupled",), samples=20))
    for check in report["checks"][1:]:
        verified = sum(int(width) * count for width, count in check["widths"].items())
        assert check["pruned"] == 0
        assert check["drafted"] > verified >= check["accepted"] + check["rejected"]


# --------------------------------------------------------------------------------------------- texts that part


def plan_of(options: Make) -> exact.Plan:
    models = models_with()
    return exact.Plan(options(), models, exact.prompts_of(models, options()))


def answers(*texts: tuple[int, ...]) -> exact.Answers:
    counters = SpecCounters(drafted=70, verified=40, accepted=30)
    counters.reached_at[1], counters.accepted_at[1] = 40, 30
    return exact.Answers(list(texts), [(False,) * len(text) for text in texts], counters, 10)


PLAIN = ((3, 4, 5), (6, 7, 8), (9, 3, 4), (5, 5, 5))


@pytest.mark.parametrize(
    ("gap", "exact_sums", "verdict", "says"),
    [
        (1e-5, True, "exact", "near tie"),
        (1e-2, True, "differs", "top-2 gap is 1.0e-02"),
        (0.1, False, "inconclusive", "proves nothing"),
        (2.5, False, "differs", "beyond rounding"),
    ],
)
def test_where_texts_part_the_gap_decides(
    options: Make, monkeypatch: pytest.MonkeyPatch, gap: float, exact_sums: bool, verdict: str, says: str
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        exact, "perturbed_gap", lambda models, prompt, output, *rest: asked.append([*prompt, *output]) or gap
    )
    monkeypatch.setattr(exact.Plan, "exact_sums", exact_sums)
    plan = plan_of(options)
    row = exact.text_check(
        plan, "greedy", "lag", "coupled", plan.greedy(), answers(*PLAIN), answers(PLAIN[0], (6, 7, 9), *PLAIN[2:])
    )
    assert (row["verdict"], row["equal"]) == (verdict, 3)
    assert says in row["why"]
    assert row["partings"] == [{"request": 1, "token": 3, "gap": gap}]
    assert asked == [[*plan.prompts[1], 6, 7]]
    same = exact.text_check(plan, "greedy", "lag", "coupled", plan.greedy(), answers(*PLAIN), answers(*PLAIN))
    assert (same["verdict"], same["why"]) == ("exact", "")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_engines_are_excused_nothing(options: Make, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Neither near ties in fp32 nor rounding in 16 bits."""
    monkeypatch.setattr(exact, "perturbed_gap", lambda *given: 1e-6)
    monkeypatch.setattr(exact.Plan, "exact_sums", dtype == "float32")
    plan = plan_of(lambda: replace(options(), engine={"deterministic": True}))
    other = answers(PLAIN[0], (6, 7, 9), *PLAIN[2:])
    row = exact.text_check(plan, "seeded", "lag", "coupled", plan.seeded(), answers(*PLAIN), other)
    assert row["verdict"] == "differs" and "deterministic" in row["why"]
    assert plan.conditions()["deterministic"]
    same = exact.text_check(plan, "seeded", "lag", "coupled", plan.seeded(), answers(*PLAIN), answers(*PLAIN))
    assert same["verdict"] == "exact"


def test_two_near_ties_in_four_are_too_many(options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "perturbed_gap", lambda *given: 1e-5)
    plan = plan_of(options)
    other = answers((3, 4, 6), (6, 7, 9), *PLAIN[2:])
    assert (
        exact.text_check(plan, "greedy", "lag", "coupled", plan.greedy(), answers(*PLAIN), other)["verdict"]
        == "differs"
    )


def test_a_text_hangs_on_drafts_where_a_row_that_missed_them_would_choose_another_token() -> None:
    models, prompt = models_with(), [3, 4, 9, 5]
    params = SamplingParams(temperature=0.0, presence_penalty=2)

    def choice(output: tuple[int, ...], seen: tuple[int, ...]) -> int:
        """Greedy under a presence penalty, by hand."""
        rows = torch.tensor([*prompt, *output])
        hidden, _ = models.target(rows, torch.arange(len(rows)), DenseAttend(models.target.spec))
        logits = models.target.logits(hidden[-1:])[0, : models.vocab_size].clone()
        logits[list(set(seen))] -= 2
        return int(logits.argmax())

    found = set()
    for first, second in itertools.product(range(models.vocab_size), repeat=2):
        text = (first, second, choice((first, second), (first, second)))
        block = (False, True, False)  # `first` ended a step, `second` was a draft, and the third stands behind it
        expected = choice(text[:2], text[:1]) != text[2]
        assert hangs_on_drafts(models, prompt, text, block, params, Shape(models, params)) == expected
        found.add(expected)
        assert not hangs_on_drafts(models, prompt, text, (False,) * 3, params, Shape(models, params))
    assert found == {True, False}


def test_the_gap_is_the_one_of_the_lossless_tests() -> None:
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, top_p=0.9, seed=4)
        ours = perturbed_gap(models_with(), [3, 4, 9, 5], [], params, Shape(models_with(), params))
        assert ours == pytest.approx(harness.perturbed_gap(models_with(), [3, 4, 9, 5], params), abs=1e-6)


# --------------------------------------------------------------------------------------------------- the chi-square


@pytest.mark.parametrize("window", [None, 3])
def test_teacher_forcing_reads_what_a_dense_forward_reads(window: int | None) -> None:
    changes = {} if window is None else {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    models = tiny_models(spec=tiny_spec("llama" if window is None else "qwen2", vocab_size=20, **changes))
    assert (models.target.spec.window(1) is None) == (window is None)
    prompt, texts = [3, 9, 4, 6], torch.tensor([[5, 6, 7, 8], [9, 3, 3, 4], [2, 2, 2, 2]])
    forced = force(models, prompt, texts)
    params = SamplingParams(temperature=0.7, top_k=5)
    for text, hidden in zip(texts, forced.hidden, strict=True):
        rows = torch.tensor([*prompt, *text.tolist()])[:-1]
        dense, _ = models.target(rows, torch.arange(len(rows)), DenseAttend(models.target.spec))
        torch.testing.assert_close(hidden, dense[len(prompt) - 1 :])
        law = laws(models, hidden, params)
        best = (models.target.logits(dense[len(prompt) - 1 :]) / 0.7).topk(5)
        torch.testing.assert_close(law.gather(1, best.indices), best.values.softmax(-1))


def test_tails_of_the_chi_square() -> None:
    """Known values: 3.841 and 18.307 are the 5% points of 1 and 10 degrees, 29.588 the 0.1% point of 10."""
    for statistic, degrees, tail in ((3.8415, 1, 0.05), (18.307, 10, 0.05), (29.588, 10, 0.001)):
        assert chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=1e-3)


def drawn(draws: np.random.Generator, laws: torch.Tensor, repeats: int) -> torch.Tensor:
    """[repeats, n] cells, one of each of the laws [n, K]."""
    u = torch.from_numpy(draws.random((repeats, len(laws), 1)))
    return (u > laws.double().cumsum(1)[None, :, :-1]).sum(-1)


def mixed_laws(draws: np.random.Generator, n: int, size: int) -> torch.Tensor:
    """Every answer has a law of its own, some of them nearly certain."""
    return torch.from_numpy(draws.dirichlet(np.linspace(0.2, 2.0, size), n))


def chi_squares(laws: torch.Tensor, cells: torch.Tensor) -> list[Any]:
    def one(row: torch.Tensor) -> Any:
        counts = Counts(laws.shape[1])
        counts.add(laws, row)
        return counts.test("here")

    return [one(row) for row in cells]


def test_false_alarms_are_as_rare_as_stated() -> None:
    """3,000 samples of a right engine: 30 below 1% are due, 15 to 50 pass (wrong once in 3,000 runs with other seeds)."""
    draws = np.random.default_rng(0)
    laws = mixed_laws(draws, 200, 9)
    found = np.array([test.p_value for test in chi_squares(laws, drawn(draws, laws, 3000))])
    assert 15 <= (found < 0.01).sum() <= 50
    assert 0.47 < found.mean() < 0.53


def test_what_is_called_visible_is_seen() -> None:
    """One cell of probability 1/2 off by that much, the others in proportion: found about 9 times in 10."""
    draws = np.random.default_rng(1)
    right = torch.tensor([0.5, *[0.5 / 7] * 7], dtype=torch.float64).expand(800, -1)
    off = visible(800, 7, 1e-4)
    wrong = torch.tensor([0.5 + off, *[(0.5 - off) / 7] * 7], dtype=torch.float64).expand(800, -1)
    p_values = np.array([test.p_value for test in chi_squares(right, drawn(draws, wrong, 400))])
    assert 0.84 < (p_values < 1e-4).mean() < 0.96


def test_a_law_in_which_nothing_varies_is_inconclusive(options: Make) -> None:
    cold = replace(LAW, temperature=1e-4)
    report = exact.verify(
        models_with("dspark"), options(modes=("static",), rules=("rejection",), sampling=cold, samples=20)
    )
    assert {c["verdict"] for c in report["checks"] if c["check"] == "law"} == {"inconclusive"}


# ------------------------------------------------------------------------------------------------- options, command


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"modes": ("lag", "lag")}, "modes is"),
        ({"modes": ("off",)}, "modes holds 'off'"),
        ({"rules": ("typical",)}, "acceptance holds 'typical'"),
        ({"positions": (0,)}, "positions holds 0"),
        ({"samples": 0}, "samples is 0"),
        ({"requests": 1.5}, "requests is 1.5"),
        ({"sampling": SamplingParams(temperature=0.0)}, "temperature is 0"),
        ({"sampling": SamplingParams(temperature=1.0, seed=2**63)}, "seed is"),
        ({"speculative": {"cost_model": "none"}}, "cost_model is 'none'"),
        ({"speculative": {"confidence_signal": "loud"}, "modes": ("lag",)}, "confidence_signal"),
    ],
)
def test_wrong_options_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        ExactOptions(**fields)


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["verify-exact", *map(str, arguments)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_command_says_and_exits_what_was_found(
    capsys: pytest.CaptureFixture[str], tiny_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with prompts_file("hello", "good day") as prompts:
        pair = ["--model", tiny_folders[0], "--draft", tiny_folders[1], "--prompts", prompts]
        small = [*pair, "--modes", "static,random", "--acceptance", "rejection", "--positions", 2, "--samples", 30]
        small += ["--requests", 2, "--max-tokens", 8, "--temperature", 0.5, "--json"]
        code, out, err = command(capsys, *small)
    report = json.loads(out)
    assert "law: 30 answers a mode" in err
    assert "no cost model" not in err  # it has one of its own
    assert report["verdict"] != "differs"
    assert code == (report["verdict"] != "exact")
    assert report["conditions"]["dtype"] == "float32"
    assert [(c["check"], c["mode"]) for c in report["checks"]] == [
        ("law", "off"), ("greedy", "static"), ("law", "static"), ("greedy", "random"), ("law", "random"),
    ]  # fmt: skip
    for verdict, expected in (("exact", 0), ("differs", 1), ("inconclusive", 1)):
        monkeypatch.setattr(exact, "run", lambda *given, v=verdict: {**report, "verdict": v})
        code, out, _ = command(capsys, *small[:-1])
        assert (code, out.strip().splitlines()[-1].strip()) == (expected, verdict)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--modes", "fast"], "modes holds 'fast'"),
        (["--positions", "1,x"], "positions is '1,x'"),
        (["--model", "elsewhere"], "needs a drafter for this model"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_options_come_from_a_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text('{"ignore_eos": true}')
    code, _, err = command(capsys, "--config", path)
    assert (code, "ignore_eos: no part of what verify-exact checks" in err) == (2, True)
