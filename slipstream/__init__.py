"""Speculative decoding with block drafters, verifying as many drafts as pay off.

    from slipstream import LLM, SamplingParams, SpeculativeConfig

The public names. They load when they are first used, so that `import slipstream` is cheap and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.config import EngineConfig, SamplingParams, SpeculativeConfig
    from slipstream.errors import SlipstreamError
    from slipstream.llm import LLM, Completion
    from slipstream.load import Models, load_models
    from slipstream.logprobs import TokenLogprob
    from slipstream.stream import Chunk
    from slipstream.structured import StructuredOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Chunk",
    "Completion",
    "EngineConfig",
    "Models",
    "SamplingParams",
    "SlipstreamError",
    "SpeculativeConfig",
    "StructuredOutput",
    "TokenLogprob",
    "load_models",
]

_HOMES = {
    "LLM": "slipstream.llm",
    "Chunk": "slipstream.stream",
    "Completion": "slipstream.llm",
    "EngineConfig": "slipstream.config",
    "Models": "slipstream.load",
    "SamplingParams": "slipstream.config",
    "SlipstreamError": "slipstream.errors",
    "SpeculativeConfig": "slipstream.config",
    "StructuredOutput": "slipstream.structured",
    "TokenLogprob": "slipstream.logprobs",
    "load_models": "slipstream.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
