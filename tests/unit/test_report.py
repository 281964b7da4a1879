"""Statistics of the bench: what a row says, and of what."""

import json
from collections import Counter

from slipstream.lab.bench_options import Case
from slipstream.lab.report import Settings, bench_row, ceiling_line, plain_json, rows_table
from slipstream.lab.waves import Answer, Wave, ttft_in_turn_ms
from slipstream.metrics import SpecCounters, Timing

SETTINGS = Settings(prompts="sample", dtype="float32", acceptance="coupled", temperature=0.0)
NAMED_KEYS = (
    "mode, prompts, dtype, acceptance, signal, waves, tok_per_s_min, tok_per_s_max, ratio_to_off, num_speculative_tokens, "
    "concurrency, temperature, requests, output_tokens, wall_s, tok_per_s, tpot_ms, ttft_ms, drafted, verified, accepted, "
    "emitted, acceptance_rate, mean_accepted_length, rows_per_step, decide_us, decide_hidden_us, build_us, gap_us, device_busy"
).split(", ")


def answer(ids: tuple[int, ...], mode: str = "static", steps: int = 2, width: int = 4, accepted: int = 1) -> Answer:
    spec = SpecCounters(mode=mode, width_histogram=Counter({width: steps}))
    for _ in range(steps):
        spec.count_step(width, width, accepted, accepted + 1)
    return Answer(token_ids=ids, spec=spec, ttft_ms=5.0, tpot_ms=10.0)


def wave(wall_s: float, *answers: Answer, num_steps: int = 2) -> Wave:
    return Wave(wall_s=wall_s, num_steps=num_steps, answers=answers)


def test_row_has_every_named_key_in_order() -> None:
    row = bench_row(
        Case(mode="off", num_speculative_tokens=None, concurrency=1), SETTINGS, None, [wave(1.0, answer((1, 2)))], ()
    )
    assert list(row)[: len(NAMED_KEYS)] == NAMED_KEYS
    json.dumps(row, allow_nan=False)


def test_speed_is_the_median_and_counters_are_sums() -> None:
    waves = [wave(t, answer((1, 2, 3, 4, 5)), answer((1, 2, 3, 4, 5))) for t in (1.0, 2.0, 4.0)]
    row = bench_row(Case(mode="static", num_speculative_tokens=4, concurrency=2), SETTINGS, None, waves, ())
    assert (row["tok_per_s_min"], row["tok_per_s"], row["tok_per_s_max"]) == (2.5, 5.0, 10.0)
    assert (row["requests"], row["output_tokens"], row["wall_s"]) == (2, 30, 7.0)
    assert (row["drafted"], row["verified"], row["accepted"], row["emitted"]) == (48, 48, 12, 24)
    assert row["acceptance_rate"] == 0.25
    assert row["mean_accepted_length"] == 2.0
    assert row["rows_per_step"] == 10.0  # two sequences of 1 + 4 rows
    assert row["acceptance_at"] == [1.0, 0.0, None, None]  # nobody came to the third


def test_ratio_and_same_text_are_against_plain_decoding_where_there_is_any() -> None:
    def row(mode: str, wall_s: float, ids: tuple[int, ...], plain: list[Wave]) -> dict[str, object]:
        case = Case(mode=mode, num_speculative_tokens=None, concurrency=1)
        return bench_row(case, SETTINGS, None, [wave(wall_s, answer(ids, mode))], plain)

    plain = [wave(2.0, answer((1, 2), "off"))]
    rows = [row("off", 2.0, (1, 2), plain), row("lag", 1.0, (1, 3), plain), row("lag", 1.0, (1, 2), [])]
    assert [r["ratio_to_off"] for r in rows] == [1.0, 2.0, None]
    assert [r["same_as_off"] for r in rows] == [1, 0, None]
    assert rows_table(rows, "t").row_count == 3


def test_acceptance_without_loops_leaves_loops_out() -> None:
    row = bench_row(
        Case(mode="static", num_speculative_tokens=4, concurrency=1),
        SETTINGS,
        None,
        [wave(1.0, answer((7,) * 40, accepted=4), answer(tuple(range(40)), accepted=1))],
        (),
    )
    assert row["looping_answers"] == 1
    assert row["mean_accepted_length"] == 3.5
    assert row["mean_accepted_length_no_loops"] == 2.0


def test_first_tokens_are_timed_from_their_turn() -> None:
    def timing(first: float, last: float) -> Timing:
        return Timing(submitted_s=0.0, first_token_s=first, last_token_s=last, num_tokens=2)

    one_by_one = [timing(1.0, 3.0), timing(4.0, 6.0), timing(8.0, 9.0)]
    assert ttft_in_turn_ms(one_by_one, 1) == [1000, 1000, 2000]
    assert ttft_in_turn_ms(one_by_one, 2) == [1000, 4000, 5000]
    assert ttft_in_turn_ms(one_by_one, 8) == [1000, 4000, 8000]


def test_plain_json_has_no_nan() -> None:
    assert plain_json({"a": [float("nan"), 1.0], "b": (float("inf"),)}) == {"a": [None, 1.0], "b": [None]}


def test_ceilings_are_one_line() -> None:
    on_cpu = {"linear_ms_1_row": 20.0, "linear_ms_8_rows": 30.0, "prepacked_ms_1_row": 10.0, "prepacked_ms_8_rows": 15.0,
              "copy_gb_per_s": 21.0, "step_ms_1_row": 12.0}  # fmt: skip
    assert ceiling_line(on_cpu) == (
        "1 row: linear layers 20.0 ms, prepacked 10.0 ms, step 12.0 ms (x 0.60 and x 1.20); "
        "8 rows: linear layers 30.0 ms, prepacked 15.0 ms; copy 21 GB/s"
    )
    on_gpu = {"linear_ms_1_row": 0.85, "linear_ms_256_rows": 7.94, "copy_gb_per_s": 4312.0, "step_ms_1_row": 1.02}
    assert ceiling_line(on_gpu) == (
        "1 row: linear layers 0.85 ms, step 1.02 ms (x 1.20); 256 rows: linear layers 7.94 ms; copy 4312 GB/s"
    )
