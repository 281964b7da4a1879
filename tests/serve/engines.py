"""What tests have an engine's process make and do; nothing of the server is needed there."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.commands.serve import make_engines as make_as_asked
from slipstream.config import SpeculativeConfig
from slipstream.decide.make import make_policy
from slipstream.engine import Engine
from slipstream.llm import LLM
from slipstream.load import Models, load_models
from slipstream.serve.driver import Driver
from slipstream.testing import assert_nothing_left
from tests.e2e.engines import price


def make_llm(models: Models, mode: str = "static", **options: Any) -> LLM:
    fields = {} if mode == "off" else {"draft_model": "tiny"}
    speculative, policy = SpeculativeConfig.for_mode(mode, **fields), None
    if mode not in ("off", "static"):  # else what steps cost would be measured, for seconds
        policy, _ = make_policy(speculative, num_drafts=5, has_head=True, cost=price())
    return LLM(
        models,
        speculative=speculative,
        policy=policy,
        **{"max_num_seqs": 4, "page_size": 8, "overlap": True, **options},
    )


def make_engines(folders: tuple[Path, Path], modes: Sequence[str], options: dict[str, Any]) -> list[LLM]:
    target, drafter = map(str, folders)
    models = load_models(target, drafter, dtype="float32", device="cpu")
    return [make_llm(models, mode, **options) for mode in modes]


def make_late(after: Path, *arguments: Any) -> list[LLM]:
    """Once there is a file; what it holds, if anything, is an error."""
    while not after.exists():
        time.sleep(0.01)
    if after.read_text():
        raise RuntimeError(after.read_text())
    return make_engines(*arguments)


def make_slow(flag: str, *arguments: Any) -> list[LLM]:
    """As `slipstream serve` makes them. Steps take long enough for signals to come in between; where there is a file
    `flag`, the next one fails.
    """
    step = Engine.step

    def slow(self: Engine) -> Any:
        time.sleep(0.01)
        if Path(flag).exists():
            raise ArithmeticError("on purpose")
        return step(self)

    Engine.step = slow  # type: ignore[method-assign]
    return make_as_asked(*arguments)


# ------------------------------------------------------------------------------------ what is asked of a driver


def nothing_left(driver: Driver) -> bool:
    assert_nothing_left(driver.llm.engine)
    return True


def slow_down(driver: Driver, seconds: float) -> None:
    """Steps that take longer, so that a test can do something meanwhile."""
    engine, step = driver.llm.engine, driver.llm.engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow  # type: ignore[method-assign]


def break_next(driver: Driver) -> None:
    """The next step fails half-way: the draft is launched, nothing is verified."""
    engine, intact = driver.llm.engine, driver.llm.engine.launch_verify

    def broken(*args: Any) -> Any:
        engine.launch_verify = intact  # type: ignore[method-assign]
        raise ArithmeticError("on purpose")

    engine.launch_verify = broken  # type: ignore[method-assign]


def break_for_good(driver: Driver) -> None:
    """The next step fails, and no engine can be made after it."""

    def broken() -> None:
        raise MemoryError

    driver.llm.restart = broken  # type: ignore[method-assign]
    break_next(driver)


def die(driver: Driver, number: int) -> None:
    os.kill(os.getpid(), number)


def fail(driver: Driver) -> None:
    raise ZeroDivisionError("on purpose")


def unsendable(driver: Driver) -> Any:
    return lambda: None


def modules_there(driver: Driver) -> list[str]:
    return [name for name in ("xgrammar", "fastapi", "uvicorn") if name in sys.modules]
