"""How many KV pages an engine gets: the arithmetic, with a GPU's numbers made up, and what of it a CPU shows."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream import load, sizes
from slipstream.config import EngineConfig, SamplingParams
from slipstream.device import memory
from slipstream.device.memory import DeviceUse, in_words, must_fit
from slipstream.errors import CapacityError, ConfigError
from slipstream.llm import LLM
from slipstream.peak import extrapolated, spread
from slipstream.sizes import FEWEST_PAGES, Peak, PoolRequest, Share, Sizes, gpu_budget, size_pool
from slipstream.testing import tiny_models, tiny_spec

GIB = 1 << 30
SIZES = Sizes(
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=4096,
    page_size=16,
    num_pages=FEWEST_PAGES,
    num_drafts=7,
)
ASKED = PoolRequest(sizes=SIZES, page_bytes=2 << 20, weights=16 * GIB, logits=GIB // 2)
USE = DeviceUse(total=140 * GIB, taken=20 * GIB, reserved=17 * GIB)
PEAK = Peak(step=5 * GIB, graphs=GIB)
OUT_OF_MEMORY = (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9 GB"))


def test_pages_take_what_is_left_below_the_mark() -> None:
    """All that is taken already counts, whoever took it."""
    assert gpu_budget(ASKED, USE, PEAK) == 126 * GIB - 20 * GIB - 6 * GIB
    assert gpu_budget(replace(ASKED, utilization=1.0), USE, PEAK) == 114 * GIB
    assert gpu_budget(replace(ASKED, utilization=0.5), USE, PEAK) == 44 * GIB


def test_engines_split_what_is_left_and_each_pays_for_its_own_steps() -> None:
    """Three, one after another: what the first ones took is taken when the next are sized."""
    use, budgets = USE, []
    for place in range(3):
        budgets.append(gpu_budget(replace(ASKED, share=Share(place, 3)), use, PEAK))
        use = replace(use, taken=use.taken + budgets[-1] + PEAK.step + PEAK.graphs)
    assert max(budgets) - min(budgets) <= 3
    assert budgets[0] == 106 * GIB // 3 - 6 * GIB
    assert use.taken <= 126 * GIB
    with pytest.raises(CapacityError):  # and nothing is left for a fourth
        gpu_budget(ASKED, use, PEAK)


def test_what_does_not_fit_is_said_with_its_numbers() -> None:
    small = DeviceUse(total=24 * GIB, taken=18 * GIB, reserved=17 * GIB)
    with pytest.raises(CapacityError) as caught:
        gpu_budget(ASKED, small, PEAK)
    said = str(caught.value)
    for number in (
        "2.40 GiB are missing", "6.00 MiB are the least", "24.00 GiB", "0.9 lets 21.60 GiB", "weights take 16.00 GiB",
        "whatever else is on the GPU 2.00 GiB", "256 sequences of 8 rows", "8192 given tokens", "5.00 GiB", "graphs 1.00 GiB",
    ):  # fmt: skip
        assert number in said
    for remedy in (
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "smaller model",
    ):
        assert remedy in said


def test_a_pool_of_less_than_the_least_that_works_is_refused() -> None:
    exact = 126 * GIB - PEAK.step - PEAK.graphs - ASKED.least
    assert gpu_budget(ASKED, replace(USE, taken=exact), PEAK) == ASKED.least
    with pytest.raises(CapacityError, match=r"6\.00 MiB are left for the KV pool, and 6\.00 MiB are the least"):
        gpu_budget(ASKED, replace(USE, taken=exact + 1), PEAK)


def sized(
    config: EngineConfig, use: DeviceUse = USE, asked: PoolRequest = ASKED
) -> tuple[int, dict[str, tuple[Any, str]]]:
    notes: list[load.Note] = []
    pages = size_pool(config, asked, lambda: use, lambda: PEAK, notes).num_pages
    return pages, {name: (value, reason) for name, value, reason in notes}


def test_never_more_pages_than_the_slots_can_use() -> None:
    pages, notes = sized(EngineConfig())
    assert pages == 100 * GIB // ASKED.page_bytes
    reason = f"{(pages - 2) * 16} tokens of KV; what that leaves below the mark"
    assert notes["kv_memory"] == (pages * ASKED.page_bytes, reason)
    how = "20.00 GiB of 140.00 GiB are taken, 16.00 GiB of it by weights; a step at its worst takes 5.00 GiB, graphs 1.00 GiB"
    assert notes["gpu_memory_utilization"] == (0.9, how)
    few = replace(ASKED, sizes=replace(SIZES, max_num_seqs=2))
    pages, notes = sized(EngineConfig(), asked=replace(few, logits=4 * GIB))
    assert pages == 2 * 256 + 2
    assert notes["kv_memory"][1] == f"{2 * 4096} tokens of KV; all that the slots can use"


def test_nothing_is_measured_where_slots_need_little_of_what_is_left() -> None:
    """But it is where logits alone are large beside that, and where slots need more than a quarter."""
    small = replace(ASKED, sizes=replace(SIZES, max_num_seqs=2))
    notes: list[load.Note] = []

    def measured() -> Peak:
        raise AssertionError("a step was measured")

    assert size_pool(EngineConfig(), small, lambda: USE, measured, notes).num_pages == 2 * 256 + 2
    assert "no step was measured" in notes[0][2]
    for asked in (
        replace(small, logits=4 * GIB),
        replace(small, page_bytes=64 << 20),
        replace(small, utilization=0.15),
    ):
        with pytest.raises(AssertionError, match="measured"):
            size_pool(EngineConfig(), asked, lambda: USE, measured, [])
        assert not sizes.is_roomy(asked, USE)
    assert sizes.is_roomy(replace(small, share=Share(0, 2)), USE)
    assert not sizes.is_roomy(replace(small, share=Share(0, 8)), USE), "its share is smaller"


def test_bytes_that_were_asked_for_win_and_nothing_is_measured() -> None:
    def measured() -> Any:
        raise AssertionError("nobody asked")

    config = EngineConfig(kv_memory="1GiB")
    notes: list[load.Note] = []
    assert size_pool(config, ASKED, measured, measured, notes).num_pages == 512
    assert notes == [("kv_memory", GIB, f"{510 * 16} tokens of KV; as asked")]
    with pytest.raises(CapacityError, match="raise kv_memory"):
        size_pool(EngineConfig(kv_memory=3 << 20), ASKED, measured, measured, [])


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * GIB), ("500MB", 500_000_000), ("1.5 gib", 3 * GIB // 2), ("64k", None), ("4096", 4096), ("7kb", 7000),
     ("1TiB", 1 << 40), ("", None), ("-1", None), ("2 GiB extra", None), ("GiB", None), ("1e9", None), ("0", None)],
)  # fmt: skip
def test_bytes_may_have_a_unit(text: str, size: int | None) -> None:
    if size is None:
        with pytest.raises(ConfigError, match="kv_memory is"):
            EngineConfig(kv_memory=text)
    else:
        assert EngineConfig(kv_memory=text).kv_memory == size


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), "0.9", True])
def test_a_utilization_outside_of_its_range_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is .*\(0, 1\]"):
        EngineConfig(gpu_memory_utilization=share)


def test_a_pool_has_one_size() -> None:
    with pytest.raises(ConfigError, match="kv_memory and gpu_memory_utilization both"):
        EngineConfig(kv_memory="1GiB", gpu_memory_utilization=0.5)


def test_a_cpu_has_no_utilization() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization has no effect on cpu.*kv_memory"):
        LLM(tiny_models(), max_model_len=64, gpu_memory_utilization=0.9)


def test_on_a_cpu_a_quarter_of_what_is_free_split_by_who_shares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    models = tiny_models()
    spec = models.target.spec
    page = 2 * spec.num_layers * 16 * spec.num_kv_heads * spec.head_dim * 4
    monkeypatch.setattr(sizes, "memory_at_hand", lambda: 80 * page)
    for share, pages in ((Share(), 20), (Share(0, 2), 10), (Share(1, 2), 10)):
        llm = LLM(models, max_model_len=128, share=share)
        assert llm.engine.scheduler.pages.num_pages == pages
        assert ("kv_memory", pages * page) == next(note[:2] for note in llm.notes if note[0] == "kv_memory")


def test_an_engine_made_anew_has_a_pool_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_models(), max_model_len=128)
    before = llm.engine.scheduler.pages.num_pages
    monkeypatch.setattr(sizes, "memory_at_hand", lambda: 0)  # others have taken it
    llm.restart()
    assert llm.engine.scheduler.pages.num_pages == before


def test_an_engine_that_found_no_room_can_be_made_once_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(tiny_models(), max_model_len=128)
    (before,), notes = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True)), list(llm.notes)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "memory_at_hand", lambda: 0)
        patch.setattr(memory, "_swap_at_hand", lambda: 0)
        for _ in range(2):
            with pytest.raises(CapacityError, match="does not fit in memory"):
                llm.restart()
    llm.restart()
    assert llm.engine.totals.emitted == before.spec.emitted and llm.notes == notes
    (after,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=4, ignore_eos=True))
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_weights_that_do_not_fit_are_named(kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*args: object, **kwargs: object) -> object:
        raise error

    monkeypatch.setattr(load, "load_decoder" if kind == "target" else "load_drafter", without_memory)
    if kind == "drafter":
        monkeypatch.setattr(load, "load_decoder", lambda *args: tiny_models().target)
    with pytest.raises(
        CapacityError, match=rf"the {kind} 'smollm2-135m.*does not fit in memory, its files hold .* free.*smaller"
    ):
        load.load_models("smollm2-135m", "smollm2-135m-dspark", dtype="float32", device="cpu")


def test_weights_drawn_at_random_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_memory(*args: object, **kwargs: object) -> object:
        raise OUT_OF_MEMORY[1]

    monkeypatch.setattr(load, "random_decoder", without_memory)
    with pytest.raises(CapacityError, match="the target 'random:qwen3-8b' does not fit in memory"):
        load.load_models("random:qwen3-8b", dtype="float32", device="cpu")


def test_a_pool_that_does_not_fit_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from slipstream import backends

    def without_memory(**kwargs: object) -> object:
        raise OUT_OF_MEMORY[0]

    monkeypatch.setattr(backends, "KVPool", without_memory)
    with pytest.raises(CapacityError, match=r"KV pool of .* pages does not fit in memory: lower kv_memory"):
        LLM(tiny_models(), max_model_len=64)


def test_a_cpu_is_not_asked_for_memory_that_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux would promise it all the same, and end the process that uses it."""
    monkeypatch.setattr(memory, "memory_at_hand", lambda: 1 << 20)
    monkeypatch.setattr(memory, "_swap_at_hand", lambda: 0)
    with pytest.raises(CapacityError, match=r"KV pool of 514 pages.*kv_memory.*1\.00 MiB free.*2\.01 MiB are needed"):
        LLM(tiny_models(), max_model_len=128, kv_memory="2TiB")
    with pytest.raises(CapacityError, match=r"max_num_seqs 2000 with max_model_len 256 .*2\.20 MiB are needed"):
        LLM(tiny_models(), max_num_seqs=2000, kv_memory="64KiB")
    claims = tiny_models(spec=tiny_spec(max_position_embeddings=1 << 20))
    with pytest.raises(CapacityError, match=r"tables of 1048576 positions do not fit.*1\.00 MiB free.*128\.00 MiB are"):
        LLM(claims, kv_memory="64KiB")
    with pytest.raises(CapacityError, match=r"the target 'smollm2-135m' does not fit in memory, its files.*are needed"):
        load.load_models("smollm2-135m", dtype="float32", device="cpu")


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="illegal"), must_fit(lambda: "no"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_sizes_in_words() -> None:
    assert [in_words(n) for n in (12, 3 << 10, 5 << 20, 3 << 29)] == ["12 bytes", "3.00 KiB", "5.00 MiB", "1.50 GiB"]
    assert re.fullmatch(r"this machine has \S+ \wiB free", memory.memory_of(torch.device("cpu")))


def test_graphs_are_extrapolated_from_a_spread_of_them() -> None:
    assert spread(range(100), 6) == [0, 19, 39, 59, 79, 99]
    assert spread([1, 2], 6) == [1, 2]
    assert spread([], 6) == []
    assert extrapolated(largest=100, more=30, num_more=3, num_others=50) == 600
    assert extrapolated(largest=100, more=-30, num_more=3, num_others=50) == 100  # others gave memory back meanwhile
    assert extrapolated(largest=100, more=0, num_more=0, num_others=0) == 100


def test_weights_count_once_where_networks_share_them() -> None:
    models = tiny_models("dspark")
    alone = sizes.weight_bytes(models.target)
    assert alone >= sum(p.nbytes for p in models.target.parameters())
    own = sum(p.nbytes for n, p in models.network.named_parameters())  # type: ignore[union-attr]
    assert alone < sizes.weight_bytes(models.target, models.network) <= alone + own + (1 << 16)
    assert sizes.weight_bytes(models.target, models.target, None) == alone
