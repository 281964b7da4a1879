"""`slipstream evaluate` on a tiny pair: its figures are those of the engine, run by hand."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.calibration import Calibration
from slipstream.errors import ConfigError
from slipstream.lab import evaluate, measure
from slipstream.lab.evaluate_options import EvaluateOptions
from slipstream.llm import LLM
from slipstream.metrics import SpecCounters
from slipstream.prompts import user
from tests.e2e.engines import Spy, models_with

MAX_TOKENS = 24
PROMPTS = {"first": ["t3 t4 t3 t4", "t5"], "second": ["t6 t6 t6", "t7 t8", "t9"]}
NUM_PROMPTS = {**{name: len(texts) for name, texts in PROMPTS.items()}, "all": 5}


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EvaluateOptions]:
    """fp32, where drafts change no text; no answer ends before its limit. Of 20 tokens, a random drafter meets some."""
    monkeypatch.setattr(measure, "load_models", lambda *names, **kinds: models_with("dspark"))
    files = []
    for name, texts in PROMPTS.items():
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"turns": [text, "t2"]}) + "\n" for text in texts))

    def make(**fields: Any) -> EvaluateOptions:
        sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=3, ignore_eos=True)
        given = {"draft": "folder/drafter", "prompts": tuple(files), "concurrency": 2, "sampling": sampling}
        return EvaluateOptions(**{**given, **fields})

    return make


def run(options: EvaluateOptions) -> dict[tuple[str, float, str], dict[str, Any]]:
    """Rows by (prompts, temperature, drafter's folder)."""
    report = evaluate.run(options, lambda line: None)
    json.dumps(report, allow_nan=False)
    return {(row["prompts"], row["temperature"], Path(row["drafter"]).name): row for row in report["rows"]}


def by_hand(drafter: str, texts: list[str], temperature: float) -> tuple[SpecCounters, list[float | None]]:
    """The counters of static serving, and its acceptance by position from what a spy saw."""
    llm = LLM(models_with("dspark"), speculative=SpeculativeConfig(draft_model=drafter), max_num_seqs=2)
    spy = Spy(llm)
    params = [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=3 + i, ignore_eos=True)
        for i in range(len(texts))
    ]
    answers = llm.chat([user(text) for text in texts], params)
    counters = SpecCounters()
    for answer in answers:
        counters.merge(answer.spec)
    reached, accepted = [0] * 7, [0] * 7
    for uid, answer in enumerate(answers, 1):
        left = len(answer.token_ids) - 1  # the first token came from the prompt
        for step, row in spy.of(uid):
            run_length, width = int(step.result.num_accepted_np[row]), step.widths[row]
            for j in range(min(width, run_length + 1, left)):
                reached[j] += 1
                accepted[j] += j < run_length
            left -= run_length + 1
            if left <= 0:
                break
    return counters, [a / r if r else None for a, r in zip(accepted, reached, strict=True)]


@pytest.mark.slow
def test_figures_are_those_of_the_engine(options: Callable[..., EvaluateOptions]) -> None:
    """Every (set, temperature): counters and acceptance by position equal a run by hand, and drafts change no text."""
    rows = run(options())
    sets, drafters = (*PROMPTS, "all"), ("off", "ngram", "drafter")
    assert list(rows) == [(name, t, who) for t in (0.0, 1.0) for name in sets for who in drafters]
    for (name, temperature, who), row in rows.items():
        assert row["same_as_off"] == row["requests"] == NUM_PROMPTS[name]
        assert row["output_tokens"] == MAX_TOKENS * row["requests"]
        assert row["ratio_to_off"] > 0
        if who == "off":
            assert (row["ratio_to_off"], row["mean_accepted_length"], row["num_speculative_tokens"]) == (1.0, 1.0, None)
        elif name != "all":
            counters, at = by_hand(who, PROMPTS[name], temperature)
            # Not "drafted": in a step in which nobody may have a draft, none is made, and neighbours differ.
            for field in ("steps", "verified", "accepted", "emitted", "mean_accepted_length"):
                assert row[field] == getattr(counters, field), (name, temperature, field)
            assert row["acceptance_at"] == pytest.approx(at)
            assert 0 <= row["ece_fresh"] <= 1
    for temperature, who in itertools.product((0.0, 1.0), ("ngram", "drafter")):
        whole, parts = rows["all", temperature, who], [rows[name, temperature, who] for name in PROMPTS]
        for field in ("steps", "verified", "accepted", "emitted", "looping_answers", "requests"):
            assert whole[field] == sum(part[field] for part in parts)
        assert 0 < whole["accepted"] < whole["verified"]


def test_without_waves_nothing_is_timed(options: Callable[..., EvaluateOptions]) -> None:
    """Then there is no plain decoding either, and `limit` takes the first prompts of each set."""
    rows = run(options(waves=0, limit=1, temperatures=(0.0,), baselines=("off",), num_speculative_tokens=2))
    assert list(rows) == [(name, 0.0, "drafter") for name in (*PROMPTS, "all")]
    for row in rows.values():
        assert (row["tok_per_s"], row["ratio_to_off"], row["same_as_off"]) == (None, None, None)
        assert (row["num_speculative_tokens"], len(row["acceptance_at"])) == (2, 2)
    assert rows["all", 0.0, "drafter"]["requests"] == 2


@pytest.mark.slow
def test_rejection_promises_the_same_text_to_greedy_requests_only(options: Callable[..., EvaluateOptions]) -> None:
    rows = run(options(speculative={"acceptance": "rejection"}, limit=1, draft="ngram"))
    assert {who for _, _, who in rows} == {"off", "ngram"}
    assert {row["same_as_off"] for (_, t, _), row in rows.items() if t == 1.0} == {None}
    assert all(row["same_as_off"] == row["requests"] for (_, t, _), row in rows.items() if t == 0.0)


def test_the_calibration_file_is_that_of_the_drafter(options: Callable[..., EvaluateOptions], tmp_path: Path) -> None:
    """It changes what is foretold, not the signal alone and not the text; n-gram look-up keeps out of it."""
    path = tmp_path / "calibration.json"
    Calibration(temperatures={("head", "greedy"): (8.0,) * 7}).save(path)
    few = {"waves": 0, "temperatures": (0.0,)}
    before, after = run(options(**few)), run(options(**few, speculative={"calibration": str(path)}))
    key = ("all", 0.0, "drafter")
    assert before[key]["ece_file"] == before[key]["ece_raw"] == after[key]["ece_raw"]
    assert after[key]["ece_file"] != after[key]["ece_raw"]
    assert before[key]["accepted"] == after[key]["accepted"]
    assert before["all", 0.0, "ngram"] == after["all", 0.0, "ngram"]


def test_what_cannot_go_well_is_refused_before_anything_is_traced(
    options: Callable[..., EvaluateOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad calibration file, one that is not there, and more drafts than the drafter makes (n-gram makes up to 16)."""
    monkeypatch.setattr(evaluate, "collect_trace", None)
    (tmp_path / "bad.json").write_text("{}")
    for fields, says in (
        ({"speculative": {"calibration": str(tmp_path / "bad.json")}}, "version must be 1"),
        ({"speculative": {"calibration": str(tmp_path / "none.json")}}, "none.json"),
        ({"num_speculative_tokens": 12}, "num_speculative_tokens is 12, the drafter drafts at most"),
    ):
        with pytest.raises(ConfigError, match=says):
            evaluate.run(options(**fields), lambda line: None)


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def test_the_command_prints_tables_and_one_object(
    tiny_folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags win over the file, several values come with commas, the JSON says what it was measured on."""
    target, drafter = tiny_folders
    in_file = {"dtype": "float32", "temperature": 0, "ignore_eos": True, "draft_layout": "fill_in"}
    (tmp_path / "options.json").write_text(json.dumps(in_file))
    (tmp_path / "p.jsonl").write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    code, out, err = command(
        capsys, "--model", target, "--draft", drafter, "--prompts", tmp_path / "p.jsonl", "--max-tokens", 6,
        "--temperature", "0,0.5", "--baselines", "off", "--num-speculative-tokens", 3, "--config",
        tmp_path / "options.json", "--output", tmp_path / "new" / "report.json", "--json",
    )  # fmt: skip
    assert code == 0, err
    report = json.loads(out)
    assert report == json.loads((tmp_path / "new" / "report.json").read_text())
    assert list(report) == ["git", "versions", "device", "model", "draft", "conditions", "rows"]
    assert [(row["temperature"], Path(row["drafter"]).name) for row in report["rows"]] == [
        (0.0, "off"), (0.0, "drafter"), (0.5, "off"), (0.5, "drafter")
    ]  # fmt: skip
    assert report["conditions"]["sampling"]["max_tokens"] == 6
    assert "accepted by position" in err, "tables go where JSON does not"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "somewhere"], ["needs a drafter", "--draft"]),
        (["--temperature", "warm"], ["temperature is 'warm'"]),
        (["--temperature", "nan"], ["temperature is nan"]),
        (["--baselines", "eagle"], ["'eagle'", "ngram"]),
        (["--prompts", "absent.jsonl"], ["absent.jsonl"]),
        (["--limit", "0"], ["limit is 0"]),
        (["--dtype", "int8"], ["dtype is 'int8'"]),
        (["--output", "/proc"], ["output /proc cannot be written", "is a folder"]),
        (["--output", "/proc/x/y"], ["output /proc/x/y cannot be written"]),
    ],
)
def test_misuse_is_named(capsys: pytest.CaptureFixture[str], flags: list[str], says: list[str]) -> None:
    """One line, exit code 2, nothing on stdout, no model loaded."""
    code, out, err = command(capsys, *flags)
    assert (code, out) == (2, ""), err
    (line,) = [each for each in err.splitlines() if each.startswith("error: ")]
    assert all(text in line for text in says), line
