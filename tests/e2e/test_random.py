"""Random models on the command line: text in, text out, in every mode, and benches of an exact shape."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams, SpeculativeConfig
from slipstream.cli import main
from slipstream.commands.bench import _bench_options
from slipstream.commands.shared import options_of

MODES = ("off", "static", "adaptive", "lag", "lag-budget")
TARGET = {
    "model_type": "qwen3", "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "eos_token_id": 5,
}  # fmt: skip
DRAFTER = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 6, "num_hidden_layers": 1,
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 400, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 256,
    "num_target_layers": 3, "dflash_config": {"mask_token_id": 399, "target_layer_ids": [0, 2]},
}  # fmt: skip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call the command in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "target.json"
    path.write_text(json.dumps(TARGET))
    return f"random:{path}"


@pytest.fixture
def dflash(tmp_path: Path) -> str:
    path = tmp_path / "drafter.json"
    path.write_text(json.dumps(DRAFTER))
    return f"random:{path}"


def last_json(out: str) -> Any:
    return json.loads(out.splitlines()[-1])


def test_generate_answers_to_the_last_token_alike_in_every_mode(
    run: Run, tiny: str, dflash: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = []
    modes = [(None, "off"), *(("random", mode) for mode in MODES[1:]), (dflash, "static")]
    for draft, mode in modes:
        flags = ["--draft", draft, "--verify", mode] if draft else []
        flags += ["--cost-model", "none"] if mode not in ("off", "static") else []
        code, out, err = run(
            "generate", "héllo", "--model", tiny, *flags, "--dtype", "float32", "--max-tokens", 40, "--temperature", 1,
            "--seed", 7, "--json",
        )  # fmt: skip
        assert code == 0, err
        assert f"model {tiny}: weights are random" in caplog.text, "whoever reads the figures must be told"
        answers.append(last_json(out))
    assert {len(answer["token_ids"]) for answer in answers} == {40}
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    assert len({(answer["text"], *answer["token_ids"]) for answer in answers}) == 1
    assert answers[0]["text"].strip()
    assert answers[1]["spec"]["accepted"] > 0, "coupled sampling agrees now and then, so the modes were compared"


def test_streams_show_the_text_of_the_answer(tiny: str) -> None:
    llm = LLM(tiny, speculative=SpeculativeConfig(draft_model="random"), dtype="float32", max_num_seqs=1)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3)
    chunks = "".join(chunk.text for chunk in llm.stream([{"role": "user", "content": "hi"}], params))
    assert chunks == llm.chat([[{"role": "user", "content": "hi"}]], params)[0].text
    assert ("draft_model_weights", "random") in {(field, value) for field, value, _ in llm.notes}
    assert llm.engine.scheduler.limits.max_drafts == 7, "S stays what users of the published files get"
    assert llm.engine.drafter is not None
    assert llm.engine.drafter.max_draft_tokens == 16


@pytest.mark.slow
def test_bench_serves_prompts_and_answers_of_an_exact_length(run: Run, tiny: str) -> None:
    code, out, err = run(
        "bench", "--model", tiny, "--draft", "random", "--modes", "off,static", "--prompts", "random:24",
        "--max-tokens", 11, "--requests", 3, "--concurrency", 2, "--waves", 2, "--dtype", "float32", "--json",
    )  # fmt: skip
    assert code == 0, err
    report = last_json(out)
    assert (report["model"], report["draft"]) == (tiny, "random")
    for row in report["rows"]:
        assert (row["prompts"], row["requests"], row["output_tokens"]) == ("random:24", 3, 2 * 3 * 11)
        assert row["same_as_off"] == 3


def test_made_up_prompts_serve_real_models_too(run: Run, tiny_folders: tuple[Path, Path]) -> None:
    code, out, err = run(
        "bench", "--model", tiny_folders[0], "--modes", "off", "--prompts", "random:8", "--max-tokens", 16,
        "--requests", 2, "--waves", 1, "--dtype", "float32", "--temperature", 1, "--json",
    )  # fmt: skip
    assert code == 0, err
    assert last_json(out)["rows"][0]["output_tokens"] == 2 * 16


def test_answers_to_made_up_prompts_do_not_end_early_unless_told_to(tmp_path: Path) -> None:
    def ignores_eos(**fields: Any) -> bool:
        return _bench_options(
            options_of({"model": "m", "modes": ["off"], **fields}, own=("prompts", "modes"))
        ).sampling.ignore_eos

    assert ignores_eos(prompts="random:8") is True
    assert ignores_eos(prompts="questions.jsonl") is False
    assert ignores_eos() is False
    path = tmp_path / "options.json"
    path.write_text('{"ignore_eos": false}')
    assert ignores_eos(prompts="random:8", config=path) is False


def test_profile_and_inspect_take_random_models(run: Run, tiny: str, dflash: str) -> None:
    code, out, err = run(
        "profile", "--model", tiny, "--draft", "random", "--budget", 0.3, "--max-num-seqs", 2, "--json", "--dtype",
        "float32",
    )  # fmt: skip
    assert code == 0, err
    assert (last_json(out)["key"]["target"], last_json(out)["key"]["drafter"]) == (tiny, "random")
    for name, kind in ((tiny, "target"), (dflash, "drafter"), ("random:qwen3-8b", "target")):
        code, out, err = run("inspect", name, "--json")
        assert code == 0, err
        report = last_json(out)
        assert (report["path"], report["kind"], report["weights"]) == (name, kind, "random")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["generate", "x", "--model", "random:gpt-5"], 1, ["no shape 'gpt-5'", "qwen3-8b"]),
        (["generate", "x", "--model", "random"], 1, ["random is a drafter", "needs a shape"]),
        (["inspect", "random"], 1, ["needs a shape"]),
        (["generate", "x", "--model", "TINY", "--draft", "random:qwen3-8b"], 1, ["qwen3-8b is no drafter"]),
        (["generate", "x", "--model", "TINY", "--draft", "random:smollm2-135m-dspark"], 1, ["does not fit", "576"]),
        (["generate", "x", "--model", "TINY", "--draft", "random", "--num-speculative-tokens", "17"], 2, ["most 16"]),
        (["train", "--out", "OUT", "--model", "TINY", "--steps", "1"], 1, ["random weights and no files"]),
        (["export", "random", "OUT", "--dialect", "z-lab"], 1, ["random weights and no files"]),
        (["bench", "--model", "TINY", "--modes", "off", "--prompts", "random:few"], 2, ["random:few", "random:128"]),
        (["bench", "--model", "TINY", "--modes", "off", "--prompts", "random:250"], 2, ["256 positions"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_line(
    run: Run, tiny: str, tmp_path: Path, arguments: list[str], code: int, says: list[str]
) -> None:
    places = {"TINY": tiny, "OUT": str(tmp_path / "out")}
    found, _, err = run(*(places.get(argument, argument) for argument in arguments))
    assert found == code, err
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert all(part in last for part in says), last
