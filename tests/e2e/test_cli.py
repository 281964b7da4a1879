"""The command line as its users see it: what goes where, exit codes, and one line for every mistake."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from slipstream import __version__
from slipstream.cli import COMMANDS, main

MODES = ("off", "static", "adaptive", "lag", "lag-budget")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the command in this process; `stdin` is what the user types."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object, stdin: str = "") -> Outcome:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def tiny(tiny_folders: tuple[Path, Path]) -> list[str]:
    return ["--model", str(tiny_folders[0]), "--draft", str(tiny_folders[1]), "--dtype", "float32"]


def with_cost(mode: str) -> list[str]:
    """Modes that decide would otherwise time steps first."""
    return ["--verify", mode, *(["--cost-model", "none"] if mode in ("adaptive", "lag", "lag-budget") else [])]


# ---- what the commands do


def test_generate_answers_alike_in_every_mode(run: Run, tiny: list[str]) -> None:
    reports = {}
    for mode in MODES:
        outcome = run("generate", "hello", *tiny, *with_cost(mode), "--max-tokens", 24, "--json")
        assert outcome.code == 0, outcome.err
        assert len(outcome.out.splitlines()) == 1, "with --json, stdout holds nothing but the object"
        reports[mode] = outcome.json
    off = reports["off"]
    assert list(off) == ["text", "token_ids", "finish_reason", "stop_reason", "usage", "spec", "timing"]
    assert set(off["usage"]) == {"prompt_tokens", "completion_tokens"}
    assert set(off["timing"]) == {"ttft_ms", "tpot_ms", "tok_per_s"}
    assert set(off["spec"]) == set(
        "mode steps drafted verified accepted emitted acceptance_rate mean_accepted_length width_histogram".split()
    )
    for mode, report in reports.items():
        assert report["spec"]["mode"] == mode
        assert report["token_ids"] == off["token_ids"]
    assert reports["static"]["spec"]["verified"] > 0


def test_generate_without_json_prints_the_text_on_stdout(run: Run, tiny_folders: tuple[Path, Path]) -> None:
    arguments = ("--model", tiny_folders[0], "--max-tokens", 8, "--dtype", "float32")
    outcome = run("generate", "hello", *arguments)
    wanted = run("generate", "hello", *arguments, "--json").json
    assert outcome.out == wanted["text"] + "\n"
    assert "mode off" in outcome.err


def test_generate_reads_a_prompt_from_stdin_and_can_be_raw(run: Run, tiny_folders: tuple[Path, Path]) -> None:
    arguments = ("generate", "-", "--model", tiny_folders[0], "--max-tokens", 2, "--dtype", "float32", "--json")
    raw = run(*arguments, "--raw", stdin="abcd").json
    assert raw["usage"]["prompt_tokens"] == 4
    assert run(*arguments, stdin="abcd").json["usage"]["prompt_tokens"] > 4


def test_same_seed_same_text(run: Run, tiny: list[str]) -> None:
    sampled = ("--temperature", 1.0, "--seed", 11, "--max-tokens", 16, "--json")
    off = run("generate", "hello", *tiny, "--verify", "off", *sampled).json
    static = run("generate", "hello", *tiny, "--verify", "static", *sampled).json
    assert off["token_ids"] == static["token_ids"]


def test_generate_stops_at_a_text(run: Run, tiny: list[str]) -> None:
    whole = run("generate", "hello", *tiny, "--max-tokens", 24, "--json").json
    stop = whole["text"].replace("\N{REPLACEMENT CHARACTER}", "")[3:5]
    asked = ("generate", "hello", *tiny, "--max-tokens", 24, "--stop", "never in it", "--stop", stop)
    found = run(*asked, "--json").json
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    assert found["text"] == whole["text"][: whole["text"].index(stop)]
    assert found["usage"]["completion_tokens"] == len(found["token_ids"]) < 24
    assert run(*asked).out == found["text"] + "\n"
    refuses(run("generate", "hello", *tiny, "--stop", ""), 2, "stop holds ''")


def test_generate_prints_logprobs_with_json(run: Run, tiny: list[str], tmp_path: Path) -> None:
    config = tmp_path / "prompt.json"
    config.write_text(json.dumps({"prompt_logprobs": 0}))
    asked = ("generate", "hello", *tiny, "--max-tokens", 6, "--logprobs", 2, "--config", config)
    found = run(*asked, "--json").json
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert all(set(entry) == {"token_id", "logprob", "rank", "top"} for entry in found["logprobs"])
    assert all(entry["top"][0] == [entry["token_id"], entry["logprob"]] for entry in found["logprobs"])  # greedy
    assert all(entry["rank"] == 1 and len(entry["top"]) == 2 for entry in found["logprobs"])
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"] and found["prompt_logprobs"][0] is None
    assert all(entry["top"] == [] and entry["logprob"] <= 0 for entry in found["prompt_logprobs"][1:])
    refuses(run(*asked), 2, "--json")
    refuses(run("generate", "hello", *tiny, "--logprobs", 21, "--json"), 2, "logprobs is 21")
    refuses(run("generate", "hello", *tiny, "--config", config), 2, "prompt_logprobs", "--json")
    refuses(run("chat", *tiny, "--config", config, stdin="hi\n"), 2, "prompt_logprobs", "chat shows none")


def test_generate_and_chat_show_all_answers(run: Run, tiny: list[str], tmp_path: Path) -> None:
    sampled = ("--temperature", 1.0, "--seed", 11, "--max-tokens", 6)
    one = run("generate", "hello", *tiny, *sampled, "--json").json
    three = run("generate", "hello", *tiny, *sampled, "--n", 3, "--json").json
    assert list(three) == ["answers", "usage"]
    assert three["answers"][0]["token_ids"] == one["token_ids"] and list(three["answers"][0]) == list(one)
    assert len({answer["text"] for answer in three["answers"]}) == 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == sum(len(answer["token_ids"]) for answer in three["answers"])
    shown = run("generate", "hello", *tiny, *sampled, "--n", 3)
    assert shown.out == "".join(answer["text"] + "\n" for answer in three["answers"])
    config = tmp_path / "three.json"
    config.write_text(json.dumps({"n": 3}))
    talked = run("chat", *tiny, *sampled, "--config", config, stdin="hello\n")
    assert talked.out == shown.out
    said = run("chat", *tiny, *sampled, "--config", config, "--json", stdin="hello\n").json["messages"]
    assert said[-1]["content"] == one["text"]
    refuses(run("generate", "hello", *tiny, "--n", 0), 2, "n is 0")


def test_a_flag_wins_over_the_file(run: Run, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = tmp_path / "slipstream.toml"
    config.write_text(f'model = "{tiny_folders[0]}"\ndtype = "float32"\nmax_tokens = 3\nignore_eos = true\n')
    assert run("generate", "x", "--config", config, "--json").json["usage"]["completion_tokens"] == 3
    outcome = run("generate", "x", "--config", config, "--max-tokens", 5, "--json")
    assert outcome.json["usage"]["completion_tokens"] == 5


def test_chat_keeps_the_conversation(run: Run, tiny: list[str]) -> None:
    typed = "hi\n\nagain\n/exit\nnot read\n"
    outcome = run("chat", *tiny, "--verify", "static", "--max-tokens", 6, "--system", "s", "--json", stdin=typed)
    assert outcome.code == 0, outcome.err
    assert [m["role"] for m in outcome.json["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert len(outcome.out.splitlines()) == 1
    reset = run("chat", *tiny, "--max-tokens", 2, "--json", stdin="hi\n/reset\nagain\n").json["messages"]
    assert [m["content"] for m in reset if m["role"] == "user"] == ["again"]


def test_bench_reports_all_modes_side_by_side(run: Run, tiny: list[str], tmp_path: Path) -> None:
    config = tmp_path / "bench.json"
    config.write_text(json.dumps({"cost_model": "none", "max_tokens": 8, "ignore_eos": True}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    outcome = run(
        "bench", *tiny, "--requests", 2, "--waves", 2, "--concurrency", "1,2", "--probe", "--config", config,
        "--prompts", prompts, "--output", tmp_path / "new" / "report.json", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == 1
    report = outcome.json
    assert list(report) == ["git", "versions", "device", "ceilings", "model", "draft", "rows"]
    assert report == json.loads((tmp_path / "new" / "report.json").read_text())
    assert [(row["mode"], row["concurrency"]) for row in report["rows"]] == [(m, c) for c in (1, 2) for m in MODES]
    for row in report["rows"]:
        assert row["output_tokens"] == 32
        assert (row["requests"], row["waves"], row["prompts"], row["dtype"]) == (2, 2, "prompts", "float32")
        assert row["tok_per_s_min"] <= row["tok_per_s"] <= row["tok_per_s_max"]
        assert row["same_as_off"] == 2
        assert row["device_busy"] is not None
        assert (row["num_speculative_tokens"], row["signal"]) == {
            "off": (None, None), "static": (5, None)
        }.get(row["mode"], (5, "head"))  # fmt: skip
        if row["mode"] == "off":
            assert (row["ratio_to_off"], row["mean_accepted_length"]) == (1.0, 1.0)
    assert {row["mode"]: row["rows_per_step"] for row in report["rows"][5:]}["off"] <= 2.0


def test_bench_takes_variants_of_lag_for_comparison(run: Run, tiny: list[str], tmp_path: Path) -> None:
    config = tmp_path / "bench.json"
    config.write_text(json.dumps({"cost_model": "none", "max_tokens": 8, "ignore_eos": True}))
    modes = ["lag", "lag-late", "fixed:0", "fixed:2"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one"]}\n{"turns": ["two"]}\n')
    outcome = run(
        "bench", *tiny, "--prompts", prompts, "--requests", 2, "--waves", 1, "--modes", ",".join(reversed(modes)),
        "--config", config, "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    rows = {row["mode"]: row for row in outcome.json["rows"]}
    assert list(rows) == ["lag", "fixed:2", "fixed:0", "lag-late"]
    assert [rows[mode]["output_tokens"] for mode in modes] == 4 * [16]
    assert rows["fixed:0"]["verified"] == 0 < rows["fixed:0"]["drafted"]
    assert set(rows["fixed:2"]["width_histogram"]) <= {"0", "1", "2"}
    assert rows["lag-late"]["width_histogram"] == rows["lag"]["width_histogram"]
    outcome = run("bench", *tiny, "--prompts", prompts, "--requests", 2, "--modes", "fixed:99", "--max-tokens", 8)
    assert (outcome.code, outcome.out) == (2, "")
    assert "modes holds 'fixed:99', and 5 tokens are drafted; lower it" in outcome.err


def test_profile_is_stored_where_auto_finds_it(run: Run, tiny: list[str], own_home: Path) -> None:
    outcome = run("profile", *tiny, "--budget", 0.5, "--max-num-seqs", 4, "--json")
    assert "no cost model" not in outcome.err, "it is about to measure one"
    assert outcome.code == 0, outcome.err
    report = outcome.json
    assert Path(report["path"]).is_relative_to(own_home)
    assert report["use"] in ("linear", "table")
    assert report["key"]["dtype"] == "float32"
    assert report["plain"]["key"]["drafter"] == "none" and report["plain"]["draft"]["ms"] == [[0.0]]
    assert report["plain"]["table"]["rows"][0] == 1
    generated = run("-v", "generate", "hi", *tiny, "--verify", "lag", "--max-tokens", 4, "--json")
    assert generated.code == 0, generated.err
    given = run("generate", "hi", *tiny, "--verify", "lag", "--max-tokens", 4, "--cost-model", report["path"], "--json")
    assert given.json["token_ids"] == generated.json["token_ids"]


def test_profile_takes_the_drafter_of_the_file(run: Run, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    config = tmp_path / "options.json"
    target, drafter = (str(folder) for folder in tiny_folders)
    config.write_text(json.dumps({"model": target, "draft_model": drafter, "dtype": "float32", "max_num_seqs": 1}))
    output = tmp_path / "new" / "cost.json"
    outcome = run("profile", "--config", config, "--budget", 0.2, "--output", output, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["key"]["drafter"] == drafter
    assert output.is_file()
    refuses(run("profile", "--model", target), 2, "name a drafter", "--draft")
    for budget in ("0", "nan", "inf"):
        refuses(run("profile", "--config", config, "--budget", budget), 2, "budget is")


def test_inspect_says_what_a_checkpoint_is(run: Run, tiny_folders: tuple[Path, Path]) -> None:
    target, drafter = (run("inspect", folder, "--json") for folder in tiny_folders)
    assert (target.json["kind"], target.json["family"]) == ("target", "llama")
    assert (drafter.json["kind"], drafter.json["layout"]) == ("drafter", "anchor_first")
    assert drafter.json["layout_reason"]
    assert drafter.json["max_draft_tokens"] == 5
    assert "layout_reason" in run("inspect", tiny_folders[1]).out
    refuses(run("inspect", tiny_folders[1], "--draft-layout", "sideways"), 2, "draft_layout is 'sideways'", "fill_in")
    other = run("inspect", tiny_folders[1], "--draft-layout", "fill_in", "--json")
    assert other.json["layout"] == "fill_in"


def test_the_layout_of_a_drafter_is_asked_for_with_one_word(run: Run, tiny: list[str], tmp_path: Path) -> None:
    """Every command that loads a drafter takes --draft-layout, and says so when it names no layout."""
    for command in ("generate", "chat", "bench", "profile", "evaluate", "calibrate", "inspect", "export"):
        assert "--draft-layout" in run(command, "--help").out
    asked = ("--draft-layout", "sideways")
    for arguments in (("generate", "x"), ("chat",), ("bench",), ("profile",), ("evaluate",), ("calibrate",)):
        refuses(run(*arguments, *tiny, *asked), 2, "draft_layout is 'sideways'", "fill_in")
    answers = [
        run("generate", "x", *tiny, "--draft-layout", layout, "--max-tokens", 16, "--json").json
        for layout in ("auto", "fill_in")
    ]
    assert answers[0]["token_ids"] == answers[1]["token_ids"]


@pytest.mark.parametrize("command", [command.__name__.replace("_", "-") for command, _ in COMMANDS])
def test_help_ends_with_an_example(run: Run, command: str) -> None:
    outcome = run(command, "--help")
    assert outcome.code == 0
    assert outcome.out.strip().splitlines()[-1].strip().startswith(f"Example: slipstream {command}")


# ---- mistakes


def refuses(outcome: Outcome, code: int, *says: str) -> None:
    """One line on stderr that names the thing and the remedy; nothing on stdout."""
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    for text in says:
        assert text in errors[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-tokens", "0"], ["max_tokens is 0", "at least 1"]),
        (["--temperature", "nan"], ["temperature is nan", "finite"]),
        (["--temperature", "-1"], ["temperature is -1"]),
        (["--top-p", "0"], ["top_p is 0", "(0, 1]"]),
        (["--top-p", "1.5"], ["top_p is 1.5"]),
        (["--top-k", "-1"], ["top_k is -1"]),
        (["--verify", "lagged"], ["verify is 'lagged'", "lag-budget"]),
        (["--num-speculative-tokens", "0"], ["num_speculative_tokens is 0"]),
        (["--num-speculative-tokens", "6"], ["num_speculative_tokens is 6", "at most 5"]),
        (["--cost-model", "none"], ["cost_model", "no effect"]),
        (["--cost-model", "absent.json", "--verify", "lag"], ["absent.json"]),
        (["--acceptance", "maybe"], ["acceptance is 'maybe'", "coupled"]),
        (["--dtype", "int8"], ["dtype is 'int8'", "bfloat16"]),
        (["--device", "tpu"], ["device is 'tpu'", "cpu"]),
        (["--verify", "off", "--num-speculative-tokens", "3"], ["num_speculative_tokens", "no effect"]),
        (["--deterministic"], ["deterministic", "GPU", "float32"]),
    ],
)
def test_wrong_values_are_named(run: Run, tiny: list[str], flags: list[str], says: list[str]) -> None:
    refuses(run("generate", "hello", *tiny, *flags), 2, *says)


def test_version(run: Run) -> None:
    outcome = run("--version")
    assert (outcome.code, outcome.out) == (0, f"slipstream {__version__}\n")


def test_an_unknown_flag_is_wrong_use(run: Run) -> None:
    outcome = run("generate", "hello", "--temprature", 1)
    assert outcome.code == 2
    assert "--temprature" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temprature": 1}, ["'temprature'", "did you mean temperature"]),
        ({"enable_lag_confidence": True}, ["enable_lag_confidence needs enable_adaptive_speculative_decode"]),
        ({"enable_lag_confidence": "yes"}, ["enable_lag_confidence is 'yes'", "true or false"]),
        ({"adaptive_speculative_min_gain": 0.1}, ["adaptive_speculative_min_gain", "no effect"]),
        ({"page_size": 0}, ["page_size is 0"]),
        ({"deterministic": "yes"}, ["deterministic is 'yes'", "true or false"]),
        ({"structured": {"jsn": True}}, ["structured has no 'jsn'"]),
        ({"structured": {"regex": "(a"}}, ["structured.regex cannot be compiled"]),
    ],
)
def test_wrong_options_in_a_file_are_named(
    run: Run, tiny: list[str], tmp_path: Path, options: dict[str, Any], says: list[str]
) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps(options))
    refuses(run("generate", "hello", *tiny, "--config", path), 2, *says)


def test_a_form_comes_from_a_file(run: Run, tiny: list[str], tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({"structured": {"choice": ["yes", "no"], "after": None}, "max_tokens": 9, "n": 3}))
    found = run("generate", "hello", *tiny, "--config", path, "--temperature", 1, "--seed", 1, "--json").json
    assert {answer["text"] for answer in found["answers"]} <= {"yes", "no"}
    assert all(answer["finish_reason"] == "stop" for answer in found["answers"])


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused(run: Run, tiny: list[str], prompt: str) -> None:
    refuses(run("generate", prompt, *tiny), 2, "prompt is empty")


def test_a_prompt_longer_than_the_context_is_refused(run: Run, tiny: list[str]) -> None:
    refuses(run("generate", "x" * 300, *tiny), 2, "prompt has", "max_model_len is 256", "shorten")


def test_missing_models_are_named(run: Run, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    refuses(run("generate", "x", "--model", "no-such-model"), 1, "no-such-model", "smollm2-135m")
    refuses(run("generate", "x", "--model", tiny_folders[0], "--draft", "no-such-drafter"), 1, "no-such-drafter")
    refuses(run("inspect", tmp_path / "nothing"), 1, "nothing")
    refuses(run("generate", "x", "--model", tiny_folders[0], "--verify", "lag"), 2, "needs a drafter", "--draft")


def edited(
    folder: Path, tmp_path: Path, tensors: Callable[[dict[str, Any]], None] | None = None, **config: Any
) -> Path:
    """A copy of a checkpoint with other tensors or config fields."""
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    if tensors:
        weights = load_file(copy / "model.safetensors")
        tensors(weights)
        save_file(weights, copy / "model.safetensors")
    fields = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**fields, **config}))
    return copy


def test_a_missing_or_surplus_tensor_is_named(run: Run, tiny_folders: tuple[Path, Path], tmp_path: Path) -> None:
    for index, (folder, dropped) in enumerate(zip(tiny_folders, ("model.norm.weight", "fc.weight"), strict=True)):
        lacks = edited(folder, tmp_path / f"lacks{index}", lambda weights, name=dropped: weights.pop(name))  # type: ignore[misc]
        extra = edited(folder, tmp_path / f"extra{index}", lambda w: w.update(surplus=w[next(iter(w))].clone()))
        where = ("--model",) if index == 0 else ("--model", tiny_folders[0], "--draft")
        refuses(run("generate", "x", *where, lacks), 1, dropped.removeprefix("model."))
        refuses(run("generate", "x", *where, extra), 1, "surplus")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"mask_token_id": 999}, ["mask_token_id 999", "outside"]),
        ({"sample_from_anchor": True, "query_zero_predicts_next": False}, ["layout", "contradict"]),
        ({"target_hidden_size": 48}, ["48", "32"]),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    run: Run, tiny_folders: tuple[Path, Path], tmp_path: Path, config: dict[str, Any], says: list[str]
) -> None:
    drafter = edited(tiny_folders[1], tmp_path, **config)
    refuses(run("generate", "x", "--model", tiny_folders[0], "--draft", drafter), 1, *says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--modes", "off,fast"], ["'fast'", "lag-budget"]),
        (["--concurrency", "one"], ["concurrency is 'one'"]),
        (["--concurrency", "8", "--requests", "4"], ["concurrency 8 with 4 requests"]),
        (["--concurrency", "0"], ["concurrency holds 0"]),
        (["--waves", "0"], ["waves holds 0"]),
        (["--requests", "99"], ["16 prompts", "99"]),
        (["--prompts", "absent.jsonl"], ["absent.jsonl"]),
        (["--modes", "lag,lag"], ["each once"]),
        (["--modes", "fixed:02"], ["'fixed:02'", "fixed:N"]),
        (["--modes", "fixed:4", "--num-speculative-tokens", "3"], ["fixed:4", "3 tokens are drafted"]),
    ],
)
def test_wrong_bench_options_are_named(run: Run, tiny: list[str], flags: list[str], says: list[str]) -> None:
    refuses(run("bench", *tiny, *flags), 2, *says)


def test_wrong_train_options_are_named(run: Run, tmp_path: Path) -> None:
    refuses(run("train"), 2, "out")
    refuses(run("train", "--out", tmp_path, "--steps", 0), 2, "steps is 0")
    refuses(run("train", "--out", tmp_path, "--algorithm", "eagle"), 2, "eagle", "dspark")
    (tmp_path / "c.json").write_text('{"preset": "dflash"}')
    refuses(run("train", "--out", tmp_path, "--config", tmp_path / "c.json"), 2, "preset is 'dflash'", "zlab-dflash")
