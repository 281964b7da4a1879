"""The engine on a CUDA device: the same text as on the CPU, in every mode, and launches that never wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.config import MODES, SamplingParams
from slipstream.draft.ngram import NGramDraft
from slipstream.engine import Engine
from slipstream.load import Models
from slipstream.testing import tiny_models, tiny_spec
from tests.lossless.harness import judge, run

pytestmark = pytest.mark.gpu

SPEC = tiny_spec(vocab_size=20)
PROMPTS = [[(7 * i + 3 * j) % 17 + 3 for j in range(1 + (5 * i) % 29)] for i in range(20)]


def on_gpu(models: Models) -> Models:
    """The same weights on the GPU."""
    target = models.target.to("cuda")
    network = models.network and models.network.to("cuda")
    if network is not None:
        network.share(target)
    return replace(models, target=target, network=network)


def serving(algorithm: str) -> dict[str, Any]:
    """Models on the GPU, and the drafter where it is not a network."""
    if algorithm == "ngram":
        return {"models": on_gpu(tiny_models(spec=SPEC)), "drafter": NGramDraft(torch.device("cuda"))}
    return {"models": on_gpu(tiny_models(algorithm, spec=SPEC))}


def params_for(temperature: float) -> list[SamplingParams]:
    top_p = 0.9 if temperature else 1.0
    return [SamplingParams(temperature=temperature, top_p=top_p, seed=i, max_tokens=12) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("algorithm", ["dspark", "dflash", "ngram"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "off"])
def test_token_ids_equal_plain_decoding_on_the_cpu(mode: str, algorithm: str, temperature: float) -> None:
    spec, params = SPEC, params_for(temperature)
    plain = run(tiny_models(spec=spec), "off", PROMPTS, params)
    other = run(**serving(algorithm), mode=mode, prompts=PROMPTS, params=params)
    outcome, found = judge(tiny_models(spec=spec), mode, PROMPTS, params, plain, other)
    assert outcome == "equal", found


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("algorithm", ["dspark", "ngram"])
@pytest.mark.parametrize("mode", ["static", "lag", "lag-budget"])
def test_launches_do_not_synchronise(mode: str, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("launch_draft", "launch_verify"):
        launch = getattr(Engine, name)

        def guarded(*args: object, launch: object = launch) -> object:
            with no_synchronisation():
                return launch(*args)  # type: ignore[operator]

        monkeypatch.setattr(Engine, name, guarded)
    assert run(**serving(algorithm), mode=mode, prompts=PROMPTS, params=params_for(1.0)).totals.accepted > 0
