"""`slipstream calibrate` on a tiny pair: what it writes is what the engine loads, and every wrong use is one line."""

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from slipstream.cli import main
from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.decide.calibration import Calibration
from slipstream.lab.calibrate import half_of
from slipstream.lab.quality import quality
from slipstream.lab.scaling import fit_temperatures
from slipstream.lab.traces import collect_trace
from slipstream.llm import LLM
from slipstream.load import load_models
from slipstream.models.headers import weights_digest
from slipstream.prompts import user

S = 5  # drafts of the tiny drafter
TEXTS = [f"{word} {count}" for count in range(5) for word in ("count", "say", "why")]


@pytest.fixture
def pair(tiny_folders, tmp_path):
    """(flags, drafter): a copy of the drafter, since the file is written into its folder."""
    drafter = tmp_path / "drafter"
    shutil.copytree(tiny_folders[1], drafter)
    prompts = tmp_path / "questions.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS))
    flags = ["--model", tiny_folders[0], "--draft", drafter, "--prompts", prompts, "--dtype", "float32"]
    return [*flags, "--max-tokens", 24], drafter


@pytest.fixture
def run(capsys, monkeypatch):
    """(exit code, stdout, stderr) of the command."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["calibrate", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_the_file_is_beside_the_drafter_and_the_engine_takes_it(run, pair):
    """Both classes and both signals, a temperature for each position; adaptive modes load it without being told."""
    flags, drafter = pair
    code, out, err = run(*flags, "--json", "--plot", drafter / "reliability.png")
    assert code == 0, err
    path = drafter / "calibration.json"
    table = Calibration.load(path)
    assert set(table.temperatures) == {(s, c) for s in ("head", "peak") for c in ("greedy", "sampled")}
    assert {len(values) for values in table.temperatures.values()} == {S}
    assert (drafter / "reliability.png").read_bytes().startswith(b"\x89PNG")

    report = json.loads(out.splitlines()[-1])
    assert (len(report["fits"]), report["calibration_file"], report["kept"]) == (4, str(path), [])
    for fit in report["fits"]:
        about = table.about[fit["signal"], fit["class"]]
        assert fit["temperatures"] == list(table.temperatures[fit["signal"], fit["class"]])
        assert 0 < about["held_out_steps"] == fit["held_out_steps"] < about["steps"] == fit["steps"]
        for form in ("raw", "file", "fresh", "lagged"):
            assert about[f"ece_{form}"] == pytest.approx(fit["calibration"][form]["ece"], abs=1e-5)
        assert about["prompts"] == ["questions"]
        assert about["num_speculative_tokens"] == S
        assert about["temperature"] == (1.0 if fit["class"] == "sampled" else 0.0)

    speculative = SpeculativeConfig.for_mode("lag", draft_model=str(drafter), cost_model="none")
    llm = LLM(str(flags[1]), speculative=speculative, dtype="float32", max_model_len=64, max_num_seqs=2)
    assert ("calibration", str(path), "as found") in llm.notes
    scale = 1 / np.array(table.temperatures["head", "greedy"])
    np.testing.assert_allclose(llm.engine.policy.calibration_np[0, :, 0], scale, rtol=1e-6)


def test_figures_are_of_the_half_that_was_not_fitted_on(run, pair):
    """By hand: the trace of the same answers, fitted on one half, measured on the other; the file holds the fit on all."""
    flags, drafter = pair
    code, out, _ = run(*flags, "--temperature", "0", "--signals", "peak", "--json")
    assert code == 0
    (fit,) = json.loads(out.splitlines()[-1])["fits"]

    models = load_models(str(flags[1]), str(drafter), dtype="float32")
    config = SpeculativeConfig(draft_model=str(drafter), num_speculative_tokens=S)
    params = SamplingParams(max_tokens=24)
    trace = collect_trace(models, config, [user(text) for text in TEXTS], params, signal="peak", seed=0)
    out_np = half_of(len(TEXTS))[trace.request_np]
    assert half_of(len(TEXTS)).sum() == len(TEXTS) // 2

    def fitted(rows):
        return fit_temperatures(rows.signal_np, rows.accepted_np, rows.widths_np)

    assert fit["temperatures"] == list(fitted(trace))
    kept = trace.rows(out_np)
    logit = np.log(kept.signal_np.astype(np.float64) / (1 - kept.signal_np.astype(np.float64)))
    for name, temperatures in (("raw", np.ones(S)), ("file", np.array(fitted(trace.rows(~out_np))))):
        survival = np.cumprod(1 / (1 + np.exp(-logit / temperatures)), axis=1)
        by_hand = quality(survival, kept.survived_np, kept.known_np)
        judged = fit["calibration"][name]
        assert judged["ece"] == pytest.approx(by_hand.ece, abs=1e-6)
        assert judged["auroc"] == pytest.approx(by_hand.auroc, abs=1e-6)
        assert judged["num"] == by_hand.num
    assert 0 < fit["calibration"]["lagged"]["num"] < fit["calibration"]["file"]["num"], "first steps have none before"


def test_the_n_gram_drafter_has_its_running_acceptance_calibrated(run, pair, tmp_path):
    """It has no folder, so the file must be named; `head` is all it has."""
    flags, _ = pair
    flags[3] = "ngram"
    code, _, err = run(*flags, "--temperature", "0", "--output", tmp_path / "made" / "ngram.json")
    assert code == 0, err
    table = Calibration.load(tmp_path / "made" / "ngram.json")
    assert list(table.temperatures) == [("head", "greedy")]


def test_what_a_run_does_not_fit_stays_in_the_file(run, pair):
    """One class after the other: the second run keeps the first one's entry, keys of an older writer too, and says so."""
    flags, drafter = pair
    path = drafter / "calibration.json"
    old = {"temperatures": [3.0], "ece_before": 0.5}
    path.write_text(json.dumps({"version": 1, "signals": {"head": {"sampled": old, "greedy": old}, "drawn": {}}}))
    code, out, err = run(*flags, "--temperature", "0", "--signals", "head", "--limit", 8, "--json")
    assert code == 0, err
    table = Calibration.load(path)
    assert table.temperatures["head", "sampled"] == (3.0,)
    assert table.about["head", "sampled"] == {"ece_before": 0.5}
    assert len(table.temperatures["head", "greedy"]) == S
    assert "ece_before" not in table.about["head", "greedy"]
    assert json.loads(out.splitlines()[-1])["kept"] == ["head sampled"]
    assert "head sampled stays" in err
    assert not [each for each in drafter.iterdir() if each.name.endswith(".tmp")]


def test_an_output_that_cannot_be_is_refused_before_anything_is_measured(run, pair, tmp_path, monkeypatch):
    """A folder, a place under a file, a file that is no calibration."""
    flags, _ = pair
    monkeypatch.setattr("slipstream.lab.calibrate.load_models", None)
    (tmp_path / "file").write_text("{}")
    for output, says in (
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "c.json", "--output"),
        (tmp_path / "file", "version"),
    ):
        code, out, err = run(*flags, "--output", output)
        assert (code, out) == (2, "")
        assert says in err
        assert str(output) in err
    assert (tmp_path / "file").read_text() == "{}"


def test_a_file_that_stays_when_the_weights_change_is_warned_of(run, pair, caplog):
    """The engine takes the file, and says so; what a later run does not fit keeps the digest of its own weights."""
    flags, drafter = pair
    few = (*flags, "--signals", "head", "--limit", 8)
    assert run(*few)[0] == 0
    speculative = SpeculativeConfig.for_mode("lag", draft_model=str(drafter), cost_model="none")

    def note():
        llm = LLM(str(flags[1]), speculative=speculative, dtype="float32", max_model_len=64, max_num_seqs=1)
        return next(reason for field, _, reason in llm.notes if field == "calibration")

    assert note() == "as found"
    assert "calibration" not in caplog.text  # of what is warned of besides

    tensors = load_file(drafter / "model.safetensors")
    tensors["fc.weight"][0, 0] += 1
    save_file(tensors, drafter / "model.safetensors")
    assert "run slipstream calibrate again" in note()
    assert "made for other weights" in caplog.text
    code, _, err = run(*few, "--temperature", "0")
    assert code == 0
    assert "to be calibrated again: head sampled" in err
    table = Calibration.load(drafter / "calibration.json")
    assert table.of_other_weights(weights_digest(drafter)) == [("head", "sampled")]
    assert run(*few, "--temperature", "1")[0] == 0
    assert note() == "as found"


def test_next_to_nothing_measured_writes_nothing(run, pair):
    """Answers of one token have no steps, of four too few; the message names both ways to get more."""
    flags, drafter = pair
    for most in (1, 2, 4):
        code, out, err = run(*flags, "--max-tokens", most)
        assert (code, out) == (2, "")
        assert "give more prompts, or raise max_tokens" in err
        assert not (drafter / "calibration.json").exists()


def test_the_drafter_is_read_as_asked(run, pair, tmp_path):
    """Rows read the other way say other things of their drafts."""
    flags, _ = pair
    few = (*flags, "--temperature", "0", "--signals", "head", "--limit", 8, "--json")
    fits = []
    for layout in ("anchor_first", "fill_in"):
        code, out, err = run(*few, "--draft-layout", layout, "--output", tmp_path / f"{layout}.json")
        assert code == 0, err
        fits += json.loads(out.splitlines()[-1])["fits"]
    assert fits[0]["temperatures"] != fits[1]["temperatures"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "0.7,1"], "0.7 and 1, and the file has one entry"),
        (["--temperature", "0,0"], "temperature"),
        (["--temperature", "warm"], "temperature is 'warm'"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--signals", "head,gut"], "signals holds 'gut'"),
        (["--limit", "3"], "3 are too few"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--num-speculative-tokens", "9"], "num_speculative_tokens"),
        (["--draft", "ngram"], "output: ngram"),
        (["--draft", "ngram", "--output", "x.json", "--signals", "peak"], "ngram"),
        (["--plot", "picture.doc"], "plot picture.doc"),
        (["--plot", "/proc/x/y.png"], "plot /proc/x/y.png cannot be written"),
        (["--dtype", "int8"], "dtype is 'int8'"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_misuse_is_one_line_that_names_the_field(run, pair, arguments, named):
    flags, drafter = pair
    code, out, err = run(*flags, *arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert err.count("\n") == 1
    assert not (drafter / "calibration.json").exists()


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(run, pair, monkeypatch):
    flags, drafter = pair
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(*flags, "--plot", "x.png")
    assert code == 2
    assert "pip install 'slipstream[plot]'" in err
    assert not (drafter / "calibration.json").exists()


def test_options_may_come_from_a_file(run, pair, tmp_path):
    """Paths and single values as JSON has them; flags win."""
    flags, drafter = pair
    config = tmp_path / "calibrate.json"
    config.write_text(
        json.dumps({"temperature": 0.5, "signals": "head", "output": str(tmp_path / "c.json"), "limit": 8})
    )
    code, _, err = run(*flags, "--config", config, "--limit", 9)
    assert code == 0, err
    table = Calibration.load(tmp_path / "c.json")
    assert list(table.temperatures) == [("head", "sampled")]
    assert table.about["head", "sampled"]["requests"] == 9
    assert not (drafter / "calibration.json").exists()


def test_the_packages_sample_is_there_and_no_evaluation_set():
    """The default prompts: read, and not among the prompts that are evaluated on."""
    from slipstream.lab.calibrate import read_conversations
    from slipstream.lab.calibrate_options import CalibrateOptions

    texts = {messages[0]["content"] for messages in read_conversations(CalibrateOptions(draft="any"))}
    assert len(texts) == 64
    root = Path(__file__).parents[2]
    for path in [*(root / "bench/data/prompts").glob("*.jsonl"), root / "slipstream/assets/prompts/gsm8k_sample.jsonl"]:
        for line in path.read_text(encoding="utf-8").split("\n"):
            assert not line or json.loads(line)["turns"][0] not in texts
