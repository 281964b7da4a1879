"""Replayed acceptance and recorded drafts among fused kernels; on a GPU in captured stages."""

import numpy as np
import pytest

from slipstream.config import SamplingParams, SpeculativeConfig
from slipstream.lab.trace_dense import collect_dense
from slipstream.testing import tiny_models, tiny_spec
from tests.e2e.test_replay import check, made_up, serve
from tests.lossless.harness import on

# The interpreter is NumPy, which warns of what padding rows do.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SLOW = pytest.mark.slow  # interpreted


@SLOW
@pytest.mark.parametrize("mode", ["static", "adaptive", "lag", "lag-budget"])
def test_every_step_goes_by_the_trace(device: str, mode: str) -> None:
    trace = made_up(4)
    compared = check(trace, *serve(trace, mode, count=3, max_tokens=9, device=device, backend="triton"))
    assert compared == 0 if mode == "static" else compared > 3


@SLOW
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dense_trace_is_that_of_plain_torch(device: str, temperature: float) -> None:
    models = tiny_models("dspark", spec=tiny_spec(vocab_size=20))
    prompts = [(5, 6, 7), (3, 4), (9, 10, 11, 12)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=6 + i, ignore_eos=True) for i in range(3)]
    speculative = SpeculativeConfig.for_mode("static", draft_model="tiny", num_speculative_tokens=3)
    room = {"concurrency": 2, "max_model_len": 64, "page_size": 8, "max_num_batched_tokens": 24}
    plain = collect_dense(models, speculative, prompts, params, **room)
    other = collect_dense(on(device, models), speculative, prompts, params, backend="triton", **room)
    assert other.token_ids_np.tolist() == plain.token_ids_np.tolist()
    assert other.runs_np.tolist() == plain.runs_np.tolist()
    for name, values in plain.signals.items():
        np.testing.assert_allclose(other.signals[name], values, atol=2e-3)
