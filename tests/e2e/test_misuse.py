"""Wrong kinds of values wherever a user can put one: an error that names the thing, and neighbours go on."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.cli import main
from slipstream.config import EngineConfig, SamplingParams, SpeculativeConfig
from slipstream.errors import CapacityError, CheckpointError, ConfigError, RequestError
from slipstream.lab.bench_options import BenchOptions
from slipstream.llm import LLM
from slipstream.load import choose_device
from slipstream.models.inspect import describe
from slipstream.options import build, gather
from slipstream.testing import assert_nothing_left, tiny_models
from slipstream.train.options import TrainOptions


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": 1e39}, "temperature"),  # fp32 on the device has no such number
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": 2**63}, "top_k"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 2**70, "min_tokens": 2**69}, "max_tokens"),
        ({"stop": ["x" * 3000, "y" * 1100]}, "stop holds 4100 characters"),  # a search for each of 128 answers
        ({"stop_token_ids": list(range(4097))}, "stop_token_ids holds 4097 ids"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": "7"}, "stop_token_ids"),
        ({"ignore_eos": "no"}, "ignore_eos"),
        *(({name: value}, name) for name in ("logprobs", "prompt_logprobs") for value in (-1, 21, True, 1.0, "5", [])),
    ],
)
def test_sampling_params_are_checked_before_the_device_sees_them(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**fields)


def test_the_largest_values_run() -> None:
    llm = LLM(tiny_models())
    for fields in ({"temperature": 3.4e38}, {"temperature": 1e-300}, {"temperature": 10**30}, {"top_p": 1e-300}):
        params = SamplingParams(**{"temperature": 1, **fields}, top_k=2**63 - 1, max_tokens=3, ignore_eos=True)
        assert len(llm.generate([[3, 4]], params)[0].token_ids) == 3
    longest = SamplingParams(max_tokens=2**63 - 1, min_tokens=2**63 - 1)
    assert llm.generate([[3, 4]], longest)[0].finish_reason == "length"
    assert_nothing_left(llm.engine)


def test_a_list_of_stop_ids_is_copied() -> None:
    stops = [5, 6]
    params = SamplingParams(stop_token_ids=stops)  # type: ignore[arg-type]
    stops.append(-1)
    assert params.stop_token_ids == (5, 6) and hash(params) == hash(SamplingParams(stop_token_ids=(5, 6)))


@pytest.mark.parametrize("field", ["draft_model", "cost_model", "calibration"])
@pytest.mark.parametrize("value", [5, True, [], {}, ""])
def test_names_and_paths_are_texts(field: str, value: object) -> None:
    adaptive = {"draft_model": "d", "enable_adaptive_speculative_decode": True}
    with pytest.raises(ConfigError, match=field):
        SpeculativeConfig(**{**adaptive, field: value})


@pytest.mark.parametrize("fields", [{"device": 0}, {"device": None}, {"overlap": "x"}, {"seed": "x"}, {"seed": 1.5}])
def test_engine_options_have_types(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        EngineConfig(**fields)


@pytest.mark.parametrize("name", ["model", "verify"])
@pytest.mark.parametrize("value", [5, [], ""])
def test_a_config_file_does_not_fall_back_to_the_default_model(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "options.json"
    path.write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=f"{name} is"):
        gather({}, path)


def test_arguments_of_llm_have_types() -> None:
    models = tiny_models()
    for model in (None, 5, {}):
        with pytest.raises(ConfigError, match="model is"):
            LLM(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="speculative is"):
        LLM(models, speculative="lag")  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="max_num_seqs"):
        LLM(models, max_num_seqs=10**30)
    with pytest.raises(CheckpointError, match="cannot be looked up"):
        LLM("x" * 5000)
    llm = LLM(models)
    for prompts in (None, 5):
        with pytest.raises(RequestError, match="prompts is"):
            llm.generate(prompts)  # type: ignore[arg-type]
    for params in (5, "x", {"max_tokens": 3}, ["x"]):
        with pytest.raises(RequestError, match="params is"):
            llm.generate([[3]], params)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="params is"):
        llm.stream([3], {})  # type: ignore[arg-type]
    assert_nothing_left(llm.engine)


WRONG = [
    {"model_type": []}, {"vocab_size": 10**12}, {"hidden_size": 10**30}, {"num_hidden_layers": 10**12},
    {"num_key_value_heads": "2"}, {"num_key_value_heads": 0}, {"head_dim": -8}, {"head_dim": 0},
    {"rms_norm_eps": "x"}, {"rms_norm_eps": float("nan")}, {"rope_theta": "x"}, {"rope_theta": -1.0},
    {"rope_scaling": "x"}, {"rope_scaling": {"rope_type": ["x"]}}, {"rope_scaling": {"rope_type": "yarn", "factor": "x"}},
    {"max_position_embeddings": "many"}, {"max_position_embeddings": 0}, {"tie_word_embeddings": "no"},
    {"layer_types": 5}, {"layer_types": [1, 2]}, {"layer_types": [[], []]}, {"eos_token_id": "x"},
    {"eos_token_id": [1.5]}, {"bos_token_id": {}},
]  # fmt: skip


@pytest.mark.parametrize("fields", WRONG, ids=lambda fields: "{}={}".format(*next(iter(fields.items()))))
def test_a_target_config_of_wrong_types_is_refused(
    tiny_folders: tuple[Path, Path], tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = shutil.copytree(tiny_folders[0], tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(CheckpointError):
        describe(folder)
    with pytest.raises(CheckpointError):
        LLM(str(folder))


def test_a_home_that_cannot_be_written_to_is_no_reason_to_fail(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").write_text("a file")
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    lag = SpeculativeConfig.for_mode("lag", draft_model=str(tiny_folders[1]))
    llm = LLM(str(tiny_folders[0]), speculative=lag, dtype="float32", max_num_seqs=1)
    reasons = {field: reason for field, _, reason in llm.notes}
    assert "not stored" in reasons["cost_model"]


def test_files_that_cannot_be_written_and_a_closed_stdin_are_one_line(
    tiny_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    models = ["--model", str(tiny_folders[0]), "--draft", str(tiny_folders[1]), "--dtype", "float32"]
    for arguments, says in (
        (["profile", *models, "--budget", "0.2", "--max-num-seqs", "1", "--output", str(tmp_path)], "directory"),
        (["generate", "-", *models], "stdin is closed"),
    ):
        monkeypatch.setattr(sys, "stdin", None)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code in (1, 2)
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields", [{"seed": "x"}, {"seed": None}, {"device": 0}, {"recipe": 5}, {"prompts": "x"}, {"answers": [1]}]
)
def test_train_options_have_types(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"train.{next(iter(fields))} is"):
        build(TrainOptions, {"model": "t", "out": str(tmp_path), **fields}, "train")


@pytest.mark.parametrize(
    "fields", [{"concurrency": ("1",)}, {"waves": "x"}, {"requests": 1.5}, {"num_speculative_tokens": ([],)}]
)
def test_bench_options_have_types(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number"):
        BenchOptions(**fields)


def test_another_gpu_than_the_first_is_chosen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, graphs and threads go by the current device: an engine on another one would launch where its tensors are not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("cuda", []) == torch.device("cuda")
    assert choose_device("cuda:0", []) == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=1"):
        choose_device("cuda:1", [])
    with pytest.raises(ConfigError, match="2 GPUs"):
        choose_device("cuda:2", [])
