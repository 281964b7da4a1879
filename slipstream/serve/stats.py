"""The engines' figures as JSON: what the page at / draws, and whoever wants figures without Prometheus.

Counts and sums are since the start, so that two looks give what happened in between. What was not measured is null,
never 0: a CPU has no device beside the host. Knows no HTTP. Called by `api`.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from slipstream.serve.lanes import Lane
from slipstream.serve.metrics import Snapshot
from slipstream.serve.service import Service
from slipstream.serve.steps import Durations

FRESH_S = 0.5  # all who ask within that time get the same answer: looking costs the engines something


class Stats:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[str, Snapshot] = {}  # by mode; of an engine that does not answer, the last one
        self._looked_s = float("-inf")
        self._lock = asyncio.Lock()

    async def look(self) -> dict[str, Any]:
        """Of all modes, at most FRESH_S old."""
        async with self._lock:
            if time.monotonic() - self._looked_s > FRESH_S:
                found = await self._service.snapshots()
                self._known |= {mode: one for mode, one in found.items() if one is not None}
                self._looked_s = time.monotonic()
        service = self._service
        return {
            "model": service.model, "max_model_len": service.host.max_model_len, "verify": service.own.mode,
            "dtype": service.host.facts.dtype,
            "acceptance": service.host.facts.speculative.acceptance,
            "needs_key": bool(service.options.keys), "ready": service.is_ready, "time_s": self._looked_s,
            "modes": {mode: _of(lane, self._known.get(mode)) for mode, lane in service.lanes.items()},
        }  # fmt: skip


def _of(lane: Lane, now: Snapshot | None) -> dict[str, Any]:
    """A mode's figures; without a snapshot only what the event loop knows."""
    about = {"state": lane.engine.state, "open": lane.num_open, "tokens": lane.num_given}
    if now is None:
        return about
    counters, timings = now.counters, now.timings
    return {
        **about, "running": now.num_running, "waiting": now.num_waiting, "kv_usage": now.kv_usage,
        "steps": now.num_decode_steps, "rows": now.num_decode_rows, "drafted": counters.drafted,
        "verified": counters.verified, "accepted": counters.accepted, "emitted": counters.emitted,
        "verified_at": _listed(counters.verified_at, 1, lane.num_drafts),
        "accepted_at": _listed(counters.accepted_at, 1, lane.num_drafts),
        "widths": _listed(counters.width_histogram, 0, lane.num_drafts),
        **{f"{name}_s": _sum(getattr(timings, name)) for name in ("step", "decide", "decide_hidden", "build", "gap")},
        "device_busy": timings.device_busy,
    }  # fmt: skip


def _listed(histogram: Mapping[int, int], first: int, last: int) -> list[int]:
    return [histogram.get(key, 0) for key in range(first, last + 1)]


def _sum(durations: Durations) -> dict[str, float] | None:
    return {"sum": durations.sum_s, "count": durations.num} if durations.num else None
