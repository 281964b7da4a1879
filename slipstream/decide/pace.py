"""What a policy does not do in every step: how long a draft length is kept, when one is drafted in full only to see,
which steps correct the cost model, and which are looked at where there is nothing to choose.

Counts steps and knows neither survivals nor prices. Called by `policy`; `build` asks which draft lengths there are.
"""

WARM_UP = 32  # rows that are drafted in full before anything is skipped: the prior is a guess until then
SKIPS_BEFORE_PROBE = 16  # steps without a draft
SHORTS_BEFORE_PROBE = 64  # steps with a shortened one: late positions are relearned now and then
CHANGE = 1 / 4  # of the sequences that decode, since the last draft in full: by more, and one is made
PROBE_SPACING = 4  # steps between two probes for such a change
CHOICE_SPACING = 16  # steps for which a draft length is kept, ...
FEW_SPACING = 4  # ... unless few sequences say less of later steps: then so many, and one more for each of them
MUCH = 1 / 8  # of the drafts that may be verified: a change by more has the draft length chosen anew
TIMED_EARLY = 64  # steps at the start that all correct the cost model
TIMED_SHARE = 0.125  # of later ones
FREE_MS = 0.05  # what all drafts of a step together may cost and are not chosen among: that takes the host longer
FREE_EVERY, FREE_SEEN = 8, 2  # of so many such steps so many are looked at, one after the other: lag's map needs both
TURN = 0.6180339887498949  # golden ratio: multiples, modulo 1, fall evenly, and into step with no rhythm of the steps


def draft_lengths(num_drafts: int) -> list[int]:
    """Lengths d that an adaptive policy may choose, 0 and S among them."""
    return sorted({0, num_drafts, *(2**i for i in range(num_drafts.bit_length()))})


class DraftLengths:
    """Which draft lengths there are, how long one is kept, and when one of full length is drafted only to see."""

    def __init__(self, num_drafts: int) -> None:
        self.sizes = draft_lengths(num_drafts)
        self._full = num_drafts
        self._num_decode = 0
        self._num_full = 0  # sequences in the last draft in full
        self._seen = 0  # rows drafted in full
        self._skipped = 0
        self._shortened = 0
        self._since_probe = PROBE_SPACING
        self._changed = False
        self._choice = 0  # the last length that was chosen, ...
        self._num_allowed = 0  # ... the drafts that might be verified then, ...
        self._age = CHOICE_SPACING  # ... and the steps it served for

    def probes(self, num_decode: int) -> bool:
        """Far more or fewer sequences may make full length pay, unless it does already; or it is time again.

        Requests that come and go one by one are no reason: a probe for each would be most of what many requests draft.
        """
        self._changed |= abs(num_decode - self._num_full) > CHANGE * self._num_full
        self._num_decode = num_decode
        due = self._changed and self._choice < self._full and self._since_probe >= PROBE_SPACING
        return (
            due or self._seen < WARM_UP or self._skipped >= SKIPS_BEFORE_PROBE or self._shortened >= SHORTS_BEFORE_PROBE
        )

    def probed(self) -> int:
        """Full length; after it, with more known, the length is chosen anew."""
        self._age = CHOICE_SPACING
        self._since_probe = -1
        return self._counted(self._full)

    def keeps(self, num_allowed: int) -> bool:
        """Whether the last choice still serves, with `num_allowed` drafts that may be verified (the sum of the caps)."""
        spacing = min(CHOICE_SPACING, FEW_SPACING + self._num_decode)
        return self._age < spacing and abs(num_allowed - self._num_allowed) <= MUCH * self._num_allowed

    def kept(self) -> int:
        self._age += 1
        return self._counted(self._choice)

    def chosen(self, length: int, num_allowed: int) -> int:
        self._choice, self._num_allowed, self._age = length, num_allowed, 1
        return self._counted(length)

    def _counted(self, length: int) -> int:
        self._skipped = self._skipped + 1 if length == 0 else 0
        self._shortened = self._shortened + 1 if length < self._full else 0
        self._since_probe += 1
        if length == self._full:
            self._changed = False
            self._num_full = self._num_decode
            self._seen += self._num_decode
        return length


class Timing:
    """Which steps correct the cost model: all early ones, then a share that no rhythm of the steps can hide from."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._untold = 0

    def is_due(self) -> bool:
        """Called once per step: whether its time is wanted."""
        self._num_steps += 1
        self._untold += 1
        return self._num_steps <= TIMED_EARLY or self._num_steps * TURN % 1.0 < TIMED_SHARE

    def steps_since(self) -> int:
        """Called for a step whose time was wanted: how many steps began since this was last called, at least 1."""
        steps, self._untold = max(self._untold, 1), 0
        return steps
