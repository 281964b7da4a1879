"""Several modes in one server: an engine each over the same weights, and nothing of one is another's."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from slipstream.cli import main
from slipstream.commands.serve import _modes, make_engines
from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.load import Models
from slipstream.options import gather
from tests.serve.conftest import CHAT, COMPLETIONS, Running, make_llm, serving, slowed
from tests.serve.test_answers import check, streamed
from tests.serve.test_failures import break_engine

FIELDS = {"prompt": "once upon", "seed": 1, "max_tokens": 30, "return_token_ids": True}
OFFERED = ("static", "off", "lag")


@pytest.fixture(scope="module")
def served(tiny_pair: Models) -> Iterator[Running]:
    with serving([make_llm(tiny_pair, mode) for mode in OFFERED]) as running:
        yield running
        running.settle()


def test_a_request_is_served_by_the_mode_it_names(served: Running, tiny_pair: Models) -> None:
    params = SamplingParams(temperature=1, seed=1, max_tokens=30)
    (expected,) = make_llm(tiny_pair, "off").generate(["once upon"], params)
    lanes = served.service.lanes
    for mode in (*OFFERED, None):
        before = {name: lane.num_given for name, lane in lanes.items()}
        check(served.post(COMPLETIONS, **FIELDS, verify=mode).json()["choices"][0], expected)
        gained = {name: lane.num_given - before[name] for name, lane in lanes.items()}
        assert gained == {name: expected.completion_tokens * (name == (mode or "static")) for name in OFFERED}
    for name, lane in lanes.items():
        assert served.metric("generation_tokens_total", mode=name) == lane.num_given
    events = streamed(served, COMPLETIONS, **FIELDS, verify="off", return_steps=True)
    assert {step["drafted"] for event in events for step in event["choices"][0]["steps"]} == {0}


@pytest.mark.parametrize("mode", ["adaptive", "fast", ""])
def test_a_mode_that_is_not_offered_is_refused(served: Running, mode: str) -> None:
    for path, fields in ((COMPLETIONS, FIELDS), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        response = served.post(path, **fields, verify=mode)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "verify")
        assert error["message"] == f"verify is {mode!r}, and this server offers static, off, lag"
    assert served.post(COMPLETIONS, **FIELDS, verify=1).json()["error"]["param"] == "verify"


def test_all_are_told_of(served: Running) -> None:
    assert served.http.get("/version").json()["modes"] == list(OFFERED)
    health = served.http.get("/health").json()
    assert health["modes"] == {mode: {"status": "running", "failures": 0, "last_failure": None} for mode in OFFERED}
    for name in (
        "num_requests_running",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "spec_decode_num_drafts_total",
    ):
        series = [
            line for line in served.http.get("/metrics").text.splitlines() if line.startswith(f"slipstream:{name}{{")
        ]
        assert [mode for mode in OFFERED if any(f'mode="{mode}"' in line for line in series)] == list(OFFERED)


def test_all_at_once_over_the_same_weights(served: Running, tiny_pair: Models) -> None:
    """Engines step in threads of their own."""
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=25) for seed in range(4)]
    expected = make_llm(tiny_pair, "off").generate(["abc"] * 4, params)

    def ask(mode: str, seed: int) -> None:
        body = {"prompt": "abc", "seed": seed, "max_tokens": 25, "return_token_ids": True, "verify": mode}
        check(served.post(COMPLETIONS, **body).json()["choices"][0], expected[seed])

    with ThreadPoolExecutor(12) as pool:
        for done in [pool.submit(ask, mode, seed) for mode in OFFERED for seed in range(4)]:
            done.result()


def test_modes_wait_for_themselves_only(tiny_pair: Models) -> None:
    """A queue that is full, and a client that leaves."""
    fast, slow = make_llm(tiny_pair, "static"), make_llm(tiny_pair, "off")
    long: dict[str, Any] = {**FIELDS, "max_tokens": 100, "ignore_eos": True}
    with serving([fast, slow], max_waiting=0) as running, slowed(slow, 0.01):
        stream = {**long, "n": 4, "stream": True, "verify": "off"}
        with running.http.stream("POST", COMPLETIONS, json=stream) as response:
            lines = response.iter_lines()  # kept: the stream is closed with it
            next(lines)
            assert running.post(COMPLETIONS, **long, verify="off").status_code == 429
            assert running.post(COMPLETIONS, **long).status_code == 200
        running.wait_until(lambda: running.service.num_open == 0)
        running.settle()


def test_one_that_fails_is_made_anew_and_the_others_go_on(tiny_pair: Models) -> None:
    broken, sound = make_llm(tiny_pair, "off"), make_llm(tiny_pair, "static")

    with serving([sound, broken]) as running:
        break_engine(broken)
        assert running.post(COMPLETIONS, **FIELDS, verify="off").status_code == 500
        running.wait_until(lambda: running.http.get("/health").status_code == 200)
        health = running.http.get("/health").json()
        assert (health["failures"], health["last_failure"]) == (1, "ArithmeticError: on purpose")
        assert [health["modes"][mode]["failures"] for mode in ("static", "off")] == [0, 1]
        assert running.metric("engine_failures_total", mode="off") == 1 == running.metric("engine_failures_total")
        for mode in ("off", "static"):
            assert running.post(COMPLETIONS, **FIELDS, verify=mode).status_code == 200
        running.settle()


def test_one_that_fails_for_good_ends_the_server(tiny_pair: Models) -> None:
    broken, sound = make_llm(tiny_pair, "off"), make_llm(tiny_pair, "static")
    with serving([sound, broken], on_engine_error="exit") as running:
        break_engine(broken)
        assert running.post(COMPLETIONS, **FIELDS, verify="off").status_code == 500
        running.wait_until(lambda: running.server.has_failed)


def modes_of(own: str, also: tuple[str, ...], **fields: Any) -> list[str]:
    return [config.mode for config in _modes(gather({"verify": own, **fields}, None), also)]


def test_options_go_to_the_modes_in_which_they_have_an_effect() -> None:
    fields = {"draft_model": "ngram", "cost_model": "none", "num_speculative_tokens": 3}
    assert modes_of("lag", ("off", "static", "lag-budget"), **fields) == ["lag", "off", "static", "lag-budget"]
    assert modes_of("off", ("lag",), draft_model="ngram") == ["off", "lag"]
    lag, static = _modes(gather({**fields, "verify": "lag"}, None), ("static",))
    assert (static.num_speculative_tokens, static.cost_model, lag.cost_model) == (3, "auto", "none")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--also", "off"], "own mode"), (["--also", "static"], "needs a drafter"), (["--also", "quick"], "also holds 'quick'"),
        (["--also", "lag,lag", "--draft", "ngram"], "once"), (["--kv-memory", "2XB"], "kv_memory is '2XB'"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization is 1.5"),
    ],
)  # fmt: skip
def test_wrong_modes_are_named_before_a_model_is_loaded(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model", "nowhere", *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_modes_split_the_memory_at_hand(tiny_pair: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream import load, sizes

    monkeypatch.setattr(load, "load_models", lambda *args, **options: tiny_pair)
    monkeypatch.setattr(sizes, "memory_at_hand", lambda: 1 << 22)
    modes = [SpeculativeConfig(), SpeculativeConfig.for_mode("static", draft_model="tiny")]

    def pools(**options: Any) -> list[int]:
        made = make_engines(gather({"max_model_len": 128, **options}, None), modes)
        return [next(int(value) for name, value, _ in llm.notes if name == "kv_memory") for llm in made]  # type: ignore[call-overload]

    assert [1 << 18 < size <= 1 << 19 for size in pools()] == [True, True]
    assert [1 << 17 < size <= 1 << 18 for size in pools(kv_memory="256KiB")] == [True, True], "of each"
