"""The rate that a step is to beat: tokens per millisecond over the last steps.

A step for itself would maximise its own tokens per millisecond, and all steps together then make fewer than they could: a
rich step stops where a draft still earns more than time is worth elsewhere, a poor one goes on past that. So the
controller maximises the rate of the step and of the last few taken together. Times are the cost model's own, not
measured, so that an error of its scale changes nothing. Called by `policy`; no clock, and it decides nothing.
"""

import numpy as np

from slipstream.decide.pace import TURN
from slipstream.plan import StepPlan, StepResult

STEPS = 8  # counted ones that the past counts for; simulated for the 8B shape, 4 do as well, at 128 requests 16 and 32 worse
COUNTED = 0.5  # of all steps: that is enough, and costs half


class GoingRate:
    """Tokens and milliseconds of the last steps, of which older ones fade, as if as many sequences had decoded as now.

    A rate that fits 32 sequences is out of reach for 3. Where steps take about the same time whatever they hold,
    tokens go by the number of sequences, and where that is not so the next steps will tell.
    """

    KEPT = 1 - 1 / STEPS  # of the past, at each step that is counted

    def __init__(self) -> None:
        self._tokens = 0.0
        self._ms = 0.0
        self._num_decode = 0  # sequences that `_tokens` is of
        self._priced: dict[int, float] = {}  # ms by step, until its tokens are known

    def past(self, num_decode: int) -> tuple[float, float]:
        """(tokens, ms); nothing before the first step."""
        if not self._num_decode:
            return 0.0, 0.0
        return self._tokens * (num_decode / self._num_decode), self._ms

    def counts(self, step: int) -> bool:
        """Half of the steps, such that no rhythm falls in with them."""
        return step * TURN % 1.0 < COUNTED

    def price(self, plan: StepPlan, ms: float) -> None:
        """What a step, in which somebody decodes, is expected to take without the prompts in it."""
        self._priced[plan.step] = ms

    def count(self, plan: StepPlan, result: StepResult) -> None:
        """What a step brought, as far as its rows teach, for all; one that was not priced does not count."""
        ms = self._priced.pop(plan.step, None)
        if ms is None:
            return
        num_decode = plan.num_decode
        accepted, teaches = result.num_accepted_np[:num_decode], plan.teaches_np[:num_decode]
        num_teaching = int(np.count_nonzero(teaches))
        if not num_teaching:
            return
        if num_teaching < num_decode:
            accepted = accepted[teaches]
        tokens = num_decode * (1 + int(np.add.reduce(accepted)) / num_teaching)
        scaled, past_ms = self.past(num_decode)
        self._tokens, self._ms = self.KEPT * scaled + tokens, self.KEPT * past_ms + ms
        self._num_decode = num_decode
