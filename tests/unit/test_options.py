"""A flag over the file, the file over the defaults, and nothing is ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError, RequestError
from slipstream.options import build, gather, merge
from slipstream.train.options import TrainOptions


def write(tmp_path: Path, options: dict[str, Any]) -> Path:
    path = tmp_path / "options.json"
    path.write_text(json.dumps(options))
    return path


def test_flag_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path, {"temperature": 0.5, "max_tokens": 9, "page_size": 32, "draft_model": "d", "verify": "lag"})
    options = gather({"temperature": 0.7, "max_tokens": None}, path)
    sampling = options.sampling_params()
    assert (sampling.temperature, sampling.max_tokens, sampling.top_p) == (0.7, 9, 1.0)
    assert options.engine_config().page_size == 32
    assert options.speculative_config().mode == "lag"


def test_toml_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text('model = "m"\nstop_token_ids = [1, 2]\n')
    options = gather({}, path)
    assert options.model == "m"
    assert options.sampling_params().stop_token_ids == (1, 2)


def test_lag_in_a_file_is_not_ignored(tmp_path: Path) -> None:
    fields = {"draft_model": "d", "enable_adaptive_speculative_decode": True, "enable_lag_confidence": True}
    assert gather({}, write(tmp_path, fields)).speculative_config().mode == "lag"
    with pytest.raises(ConfigError, match="enable_lag_confidence needs"):
        gather({}, write(tmp_path, {"draft_model": "d", "enable_lag_confidence": True})).speculative_config()


def test_verify_flag_overrules_the_mode_of_the_file(tmp_path: Path) -> None:
    fields = {"draft_model": "d", "enable_adaptive_speculative_decode": True, "enable_lag_confidence": True}
    assert gather({"verify": "static"}, write(tmp_path, fields)).speculative_config().mode == "static"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temprature": 1}, "did you mean temperature"),
        ({"draft_model": "d", "verify": "lag", "enable_lag_confidence": True}, "both say the mode"),
        ({"verify": "lag"}, "needs a drafter"),
        ({"verify": "lagged", "draft_model": "d"}, "choose one of off, static"),
        ({"verify": "off", "draft_model": "d", "cost_model": "none"}, "no effect with verify off"),
        ({"verify": "static", "draft_model": "d", "cost_model": "none"}, "no effect without enable_adaptive"),
        ({"num_speculative_tokens": 3}, "no effect without draft_model"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gather({}, write(tmp_path, options)).speculative_config()


def test_values_are_checked_by_their_class() -> None:
    with pytest.raises(RequestError, match="temperature is nan"):
        gather({"temperature": float("nan")}, None).sampling_params()


@pytest.mark.parametrize("text", ["[1, 2]", "{", ""])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json"):
        gather({}, path)


def test_train_options_take_nested_tables(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompts": ["a.jsonl"], "recipe": {"row_tokens": 64, "losses": {"ce": 1.0}}, "steps": 3})
    options = build(TrainOptions, merge({"out": Path("o"), "steps": 5}, path, {"model": "t"}), "train")
    assert (options.model, options.out, options.steps, options.prompts) == ("t", Path("o"), 5, (Path("a.jsonl"),))
    assert (options.recipe.row_tokens, options.recipe.losses.ce) == (64, 1.0)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model": "t"}, "train: missing .* 'out'"),
        ({"model": "t", "out": "o", "stepps": 1}, "unknown option 'stepps' of train; did you mean steps"),
        ({"model": "t", "out": "o", "recipe": {"losses": {"cee": 1}}}, "of train.recipe.losses; did you mean ce"),
    ],
)
def test_train_options_refuse_what_they_do_not_know(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(TrainOptions, values, "train")
