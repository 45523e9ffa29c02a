"""When the next token of an interactive request is due."""

import pytest

from scheduler.clock import NEVER_S
from scheduler.deadlines import deadline_s
from tests.scheduler.builders import make_decode, make_state, make_tiers

PACED = make_tiers(realtime={"slo": {"ttft_p99_ms": 500, "itl_p99_ms": 100, "tpot_ms": 40}})
OPEN = make_tiers(realtime={"slo": {}})


def test_a_first_token_is_due_by_the_ttft_slo() -> None:
    assert deadline_s(make_state("r", claimed_s=3.0)) == pytest.approx(3.5)


def test_the_next_token_is_due_by_the_itl_slo_after_the_last_one() -> None:
    assert deadline_s(make_decode("r", "realtime", last_token_s=7.0)) == pytest.approx(7.1)


def test_an_answer_that_lags_behind_its_tpot_is_due_earlier() -> None:
    """Arrival 0, TTFT 500 ms, 40 ms for each of 3 tokens since: due at 0.62, though a gap would allow more."""
    late = make_decode("r", "realtime", tiers=PACED, output=3, claimed_s=0.0, last_token_s=0.6)
    assert deadline_s(late) == pytest.approx(0.5 + 3 * 0.04)
    early = make_decode("r", "realtime", tiers=PACED, output=3, claimed_s=0.0, last_token_s=0.3)
    assert deadline_s(early) == pytest.approx(0.4)


def test_without_an_slo_there_is_no_deadline() -> None:
    state = make_decode("r", "realtime", tiers=OPEN, last_token_s=7.0)
    assert deadline_s(state) == NEVER_S
