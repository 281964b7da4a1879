"""The steps that a GPU's KV pool is sized by: as large as any that the scheduler plans, on a pool of one page."""

import itertools
from typing import Any

import pytest
import torch

from slipstream import LLM, build, peak
from slipstream.cache.pages import NUM_RESERVED_PAGES
from slipstream.config import EngineConfig, SamplingParams, SpeculativeConfig
from slipstream.device.memory import DeviceUse
from slipstream.draft.ngram import NGramDraft
from slipstream.engine import Engine
from slipstream.rehearse import run_largest_steps
from slipstream.sizes import FEWEST_PAGES, Peak, PoolSize, size_pool
from tests.e2e.engines import ScriptedDrafter, make_llm, models_with, prompts_of

SIZES = {"max_model_len": 96, "page_size": 8, "max_num_batched_tokens": 40, "max_num_seqs": 4}


class Watched:
    """What a target was given, step by step."""

    def __init__(self, engine: Engine) -> None:
        self.rows: list[int] = []
        self.outputs: list[int] = []
        verify = engine.target.verify

        def noting(batch: Any, token_ids: Any, shape: Any) -> Any:
            self.rows.append(len(token_ids))
            self.outputs.append(shape.num_outputs)
            return verify(batch, token_ids, shape)

        engine.target.verify = noting  # type: ignore[method-assign]


def smallest(mode: str, acceptance: str = "coupled", **options: Any) -> Engine:
    """An engine on one page, as `build` makes it to be measured."""
    speculative = SpeculativeConfig()
    if mode != "off":
        fields: dict[str, Any] = {"cost_model": "none"} if mode == "lag" else {}
        speculative = SpeculativeConfig.for_mode(
            mode, draft_model="tiny", num_speculative_tokens=4, acceptance=acceptance, **fields
        )
    models = models_with() if mode == "off" else models_with("dspark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "size_pool", lambda *args: PoolSize(num_pages=FEWEST_PAGES, num_bytes=0))
        return build.build_engine(models, speculative, EngineConfig(**{**SIZES, **options}), []).engine


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("mode", ["off", "static", "lag"])
def test_one_page_is_enough_for_steps_as_large_as_any(mode: str, acceptance: str) -> None:
    engine = smallest(mode, acceptance)
    watched = Watched(engine)
    plans = run_largest_steps(engine)
    drafts = 0 if mode == "off" else 4
    # Four that decode; then 40 given rows, of one prompt beside none that decode, beside one, two and three.
    assert watched.rows == [4 * (1 + drafts), *(40 + n * drafts for n in range(4))]
    assert watched.outputs == [4 * (1 + drafts), *(1 + n * (1 + drafts) for n in range(4))]
    assert all(plan.any_sampled and plan.any_top_p and plan.any_penalty and plan.logprobs for plan in plans)
    assert [plan.reads_prompts for plan in plans] == [False, True, True, True, True]


def test_no_served_step_is_larger() -> None:
    llm = make_llm("static", models=models_with("dspark"), num_drafts=4, **SIZES)
    served = Watched(llm.engine)
    llm.generate(prompts_of(70, 33, 90, 12, 41, 8), SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True))
    engine = smallest("static")
    watched = Watched(engine)
    run_largest_steps(engine)
    assert max(served.rows) <= max(watched.rows) and max(served.outputs) <= max(watched.outputs)


@pytest.mark.parametrize("length", [2, 3, 7, 20])
def test_short_contexts_take_several_prompts_to_fill_a_step(length: int) -> None:
    engine = smallest("static", max_model_len=length)
    watched = Watched(engine)
    *_, mixed = run_largest_steps(engine)
    assert max(watched.rows) <= 40 + 16
    assert mixed.num_given == min(40, 4 * (length - 1))
    assert int(mixed.num_given_np.max()) <= length - 1


def test_a_drafter_of_the_callers_own_is_not_called() -> None:
    """It is to see real requests only; look-up stands in for it."""
    drafter = ScriptedDrafter([[3, 4, 5, 6]], max_draft_tokens=4)
    made: list[Engine] = []

    def watch(make: Any, device: Any, lengths: Any, pool_bytes: int) -> Peak:
        made.append(make())
        run_largest_steps(made[0])
        pool = made[0].target.pool
        assert pool_bytes == pool.keys.nbytes + pool.values.nbytes
        return Peak(step=1, graphs=0)

    with pytest.MonkeyPatch.context() as patch:
        gpu = DeviceUse(total=1 << 16, taken=0, reserved=0)
        patch.setattr(
            build, "size_pool", lambda config, asked, use, *rest: size_pool(config, asked, lambda: gpu, *rest)
        )
        patch.setattr(build, "measure_peak", watch)
        patch.setattr(build, "free_use", lambda device: gpu)
        speculative = SpeculativeConfig.for_mode("static", draft_model="scripted", num_speculative_tokens=4)
        engine, _ = build.build_engine(models_with(), speculative, EngineConfig(**SIZES), [], drafter)
    assert engine.drafter is drafter and isinstance(made[0].drafter, NGramDraft)


def test_an_engine_that_is_made_again_has_the_pool_and_the_promise_of_the_one_before() -> None:
    """Whatever others have taken since; a pool that was asked for was not measured, and promises nothing."""
    promised: list[int] = []
    taken = itertools.cycle([5000, 5300])  # before an engine is made, and once it is
    models = models_with()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "free_use", lambda device: DeviceUse(total=1 << 30, taken=next(taken), reserved=0))
        patch.setattr(build, "promise", lambda engine, num_bytes: promised.append(num_bytes))
        patch.setattr(build, "size_pool", lambda *args: PoolSize(num_pages=9, num_bytes=200, beside=700))
        llm = LLM(models, **SIZES)
        patch.setattr(build, "size_pool", lambda *args: pytest.fail("it was sized again"))
        llm.restart()
        assert llm.engine.scheduler.pages.num_usable == 9 - NUM_RESERVED_PAGES
        assert promised == [200 + 700 - 300] * 2
        patch.undo()
    llm = LLM(models, kv_memory="1MiB", **SIZES)
    usable = llm.engine.scheduler.pages.num_usable
    llm.restart()
    assert llm.engine.scheduler.pages.num_usable == usable and len(promised) == 2


def test_what_steps_will_take_is_kept_from_engines_that_are_sized_later() -> None:
    """An idle engine does not hold it, so the device does not know of it."""
    engine = smallest("static")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak.torch.cuda, "synchronize", lambda device: None)
        patch.setattr(peak.torch.cuda, "empty_cache", lambda: None)
        patch.setattr(peak, "with_index", lambda device: torch.device("cpu"))
        patch.setattr(DeviceUse, "of", lambda device: DeviceUse(total=1 << 20, taken=1000, reserved=500))
        before = peak.free_use(torch.device("cuda")).taken
        peak.promise(engine, 7000)
        assert peak.free_use(torch.device("cuda")).taken == before + 7000
        peak.promise(engine, -5)
        assert peak.free_use(torch.device("cuda")).taken == before
        peak.promise(engine, 7000)
        del engine
        assert peak.free_use(torch.device("cuda")).taken == before, "it is gone"
