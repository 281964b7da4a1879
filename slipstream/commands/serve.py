"""`slipstream serve`."""

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from slipstream.commands import flags
from slipstream.commands.shared import options_of, several
from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError
from slipstream.options import DEFAULT_MODEL, MODE_FLAGS, Options, build, field_names
from slipstream.serve.options import ServeOptions

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.serve.engine_process import EngineProcess

log = logging.getLogger("slipstream.serve")

KEPT_PRODUCTS = 128


def serve(
    model: flags.Model = None,
    draft: flags.Draft = None,
    verify: flags.Verify = None,
    also: Annotated[
        str | None, typer.Option(help="Further modes that requests may ask for: off,static. Default: none.")
    ] = None,
    num_speculative_tokens: flags.NumDrafts = None,
    dtype: flags.Dtype = None,
    device: flags.Device = None,
    deterministic: flags.Deterministic = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Answers made at a time. Default: 64 on a CPU, 256 on a GPU.")
    ] = None,
    kv_memory: flags.KVMemory = None,
    gpu_memory_utilization: flags.Utilization = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes any that is free. Default: 8000.")] = None,
    served_name: Annotated[str | None, typer.Option(help="What requests call the model. Default: as --model.")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="File with a key a line. Default: no key is asked for.")] = None,
    request_timeout_s: Annotated[
        float | None, typer.Option("--request-timeout", help="Seconds for a whole answer. Default: 600.")
    ] = None,
    on_engine_error: Annotated[
        str | None, typer.Option(help="restart the engine, or exit with code 1. Default: restart.")
    ] = None,
    config: flags.Config = None,
) -> None:
    """Serve the OpenAI API (chat, completions) until SIGTERM. docs/SERVING.md says what it knows.

    The config file may also have draft_layout, cost_model, acceptance, max_model_len, and what
    docs/SERVING.md marks with a star.
    """
    own = field_names(ServeOptions) - {"keys"}
    options = options_of({**locals(), "also": several("also", also, str)}, own=tuple(own))
    if options.sampling:
        raise ConfigError(f"{', '.join(sorted(options.sampling))}: no effect here; every request says what it asks for")
    serving = build(ServeOptions, options.command, "serve")
    modes = _modes(options, serving.also)
    _require_libraries()
    _bound_kept_products()
    options.engine_config()  # refuses before anything is loaded
    from slipstream.compiler import shared_trials
    from slipstream.serve.app import bind, run
    from slipstream.serve.logs import configure_logging

    bound = bind(serving)
    before = signal.signal(signal.SIGTERM, _end)  # the first process of a container would not heed it
    configure_logging()
    about = {"model": options.model or DEFAULT_MODEL, "modes": [mode.mode for mode in modes]}
    log.info("loading", extra={"fields": about})
    try:
        with _engines(options, modes, serving) as engines:
            try:
                run(engines, serving, options.model or DEFAULT_MODEL, bound)
            finally:
                shared_trials().end()
    finally:
        bound.close()
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> NoReturn:
    """While it does not serve yet. What was begun is taken back."""
    sys.exit(128 + number)


@contextmanager
def _engines(
    options: Options, modes: Sequence[SpeculativeConfig], serving: ServeOptions
) -> "Iterator[EngineProcess | list[LLM]]":
    if not serving.engine_process:
        yield make_engines(options, modes)
        return
    from slipstream.serve.engine_process import EngineProcess

    process = EngineProcess(make_engines, options, modes, options=serving)
    try:
        yield process
    finally:
        process.close()


def _bound_kept_products() -> None:
    """Before torch is loaded. On a CPU it keeps code for each product by its number of rows, of 1,024 in two places.

    A server meets ever new numbers of rows, and would grow for hours. Making those anew that were thrown away costs next to
    nothing beside the steps.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KEPT_PRODUCTS))


def _modes(options: Options, also: Sequence[str]) -> list[SpeculativeConfig]:
    """The server's own way of speculating, and those beside it with the options that have an effect in them."""
    own = options.speculative_config()
    if own.mode in also:
        raise ConfigError(f"also holds {own.mode!r}, which is the server's own mode; name others")
    fields = {name: value for name, value in options.speculative.items() if name not in MODE_FLAGS}
    if not fields.get("draft_model") and set(also) - {"off"}:
        raise ConfigError(f"also {','.join(also)} needs a drafter; name one with --draft")
    return [own, *(SpeculativeConfig.with_effect(mode, **fields) for mode in also)]


def make_engines(options: Options, modes: Sequence[SpeculativeConfig]) -> "list[LLM]":
    """One for each mode, all of the same weights, tokenizer and compiled grammars."""
    sized = options.engine_config()
    from slipstream.llm import LLM
    from slipstream.load import load_models
    from slipstream.sizes import Share

    drafter = next((mode.draft_model for mode in modes if mode.draft_model is not None), None)
    layout = options.speculative.get("draft_layout", "auto")
    model = options.model or DEFAULT_MODEL
    models = load_models(model, drafter, dtype=sized.dtype, device=sized.device, layout=layout)
    fields = {field.name: getattr(sized, field.name) for field in dataclasses.fields(sized)}
    shares = [Share(place, len(modes)) for place in range(len(modes))]
    llms = [LLM(models, speculative=mode, share=share, **fields) for mode, share in zip(modes, shares, strict=True)]
    for llm in llms:
        llm.grammars = llms[0].grammars
    return llms


def _require_libraries() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f'serve needs {error.name}, which is not installed: pip install -e ".[serve]"') from error
