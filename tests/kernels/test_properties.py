"""The property of tests/lossless/test_properties.py, of engines whose parts are Triton kernels, interpreted.

A step takes most of a second, so there are few examples, each of which has to draft, and none is made smaller.
"""

import pytest
from hypothesis import Phase, settings

from tests.kernels.conftest import HAS_CUDA
from tests.lossless.test_properties import PROFILE, Case, cases, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, about masked places
    pytest.mark.skipif(HAS_CUDA, reason="drafts are scripted on the CPU"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]


def speculates(case: Case) -> bool:
    """Whether answers are long enough for blocks of drafts, of which some are right and some wrong."""
    long = all(params.max_tokens >= 8 for params in case.params)
    return long and case.num_drafts >= 3 and 0 < case.errors < 1


@pytest.mark.parametrize(("mode", "sampled"), [("static", False), ("lag-budget", True)])
def test_any_requests_are_answered_as_plain_decoding_answers_them(mode: str, sampled: bool) -> None:
    run(mode, cases(sampled).filter(speculates), 2, settings(PROFILE, phases=[Phase.generate]), backend="triton")
