"""As test_score_rows, in checkpoint arithmetic.

The fast tests compare rows of `score` with cached prefill, at 1 and 65 rows (`test_cached`).
"""

import pytest

from tests.invariance.checker import ROWS, differing_prefixes
from tests.invariance.test_score_rows import scorer

FAST = (1, 8, 65)
pytestmark = pytest.mark.accept(2)


@pytest.mark.slow
def test_rows_of_score_in_checkpoint_arithmetic():
    assert differing_prefixes(scorer("checkpoint"), FAST) == []


@pytest.mark.slow
def test_rows_of_score_in_checkpoint_arithmetic_at_the_other_lengths():
    rest = tuple(count for count in ROWS[:-1] if count not in FAST)
    assert differing_prefixes(scorer("checkpoint"), rest) == []
