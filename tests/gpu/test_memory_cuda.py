"""KV pools sized by what an engine is seen to take of a GPU: it is used up to the mark, and no step goes beyond."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.device.memory import DeviceUse
from slipstream.errors import CapacityError
from slipstream.llm import LLM
from slipstream.load import Models, load_models
from slipstream.sizes import Share

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
CUDA = torch.device("cuda")
WIDE = "random:qwen3-8b"  # 152k token ids; slots that could fill several GPUs
ROOM = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 40_960}


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    yield load_models(WIDE, "random", dtype="bfloat16", device="cuda")
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def made(models: Models, acceptance: str, utilization: float = 0.6, **options: Any) -> LLM:
    speculative = SpeculativeConfig.for_mode(
        "static", draft_model="random", acceptance=acceptance, num_speculative_tokens=7
    )
    given = {**ROOM, "gpu_memory_utilization": utilization, **options}
    return LLM(models, speculative=speculative, **given)


def note(llm: LLM, field: str) -> Any:
    return next(value for name, value, _ in llm.notes if name == field)


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_a_full_batch_stays_below_the_mark_and_uses_it(models: Models, acceptance: str) -> None:
    """Fault 23: all sequences at S + 1 rows, T = 1 with top-p and log-probabilities, prompts that fill steps."""
    llm = made(models, acceptance)
    total = DeviceUse.of(CUDA).total
    mark = int(0.6 * total)
    assert note(llm, "kv_memory") > GIB, "the slots could use far more than there is"
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, top_k=40, logprobs=20, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(96)
    ]
    prompts = [[(7 * i + j) % 1000 + 5 for j in range(300 + i)] for i in range(96)]
    torch.cuda.reset_peak_memory_stats()
    beside = DeviceUse.of(CUDA).beside_torch
    answers = llm.generate(prompts, params)
    assert all(answer.error is None and len(answer.token_ids) == 24 for answer in answers)
    most = torch.cuda.max_memory_reserved() + beside
    assert most <= mark + 256 * MIB, f"{most - mark} bytes beyond the mark"
    assert most >= mark - 6 * GIB, f"{mark - most} bytes were left unused"


def test_engines_split_what_is_left(models: Models) -> None:
    llms = [made(models, "coupled", share=Share(place, 2)) for place in range(2)]
    first, second = (note(llm, "kv_memory") for llm in llms)
    assert abs(first - second) < 0.1 * first
    assert DeviceUse.of(CUDA).taken <= 0.6 * DeviceUse.of(CUDA).total
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization 0\.6"):
        made(models, "coupled")
    assert llms[0].generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))[0].error is None


def test_an_engine_made_anew_beside_another_has_its_pool_again(models: Models) -> None:
    llms = [made(models, "coupled", share=Share(place, 2)) for place in range(2)]
    before = llms[0].engine.scheduler.pages.num_pages
    llms[0].restart()
    assert llms[0].engine.scheduler.pages.num_pages == before


def test_what_does_not_fit_is_refused_with_numbers_and_leaves_nothing(models: Models) -> None:
    taken = torch.cuda.memory_allocated()
    with pytest.raises(CapacityError, match=r"least that works.*weights take .*GiB.*a step at its worst"):
        made(models, "coupled", utilization=0.05)
    with pytest.raises(CapacityError, match=r"KV pool of .* does not fit"):
        made(models, "coupled", utilization=None, kv_memory="400GiB")
    gc.collect()
    assert torch.cuda.memory_allocated() - taken < 64 * MIB


def test_weights_that_do_not_fit_are_named(models: Models) -> None:
    use = DeviceUse.of(CUDA)
    held = torch.empty(use.total - use.taken - 2 * GIB, dtype=torch.uint8, device="cuda")
    with pytest.raises(CapacityError, match="the target 'random:qwen3-8b' does not fit in memory; cuda"):
        load_models(WIDE, dtype="bfloat16", device="cuda")
    del held


def test_the_slots_bound_the_pool(models: Models) -> None:
    llm = made(models, "coupled", max_num_seqs=2, max_model_len=256)
    assert llm.engine.scheduler.pages.num_tokens == 2 * 256
