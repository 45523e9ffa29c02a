"""The core without I/O, stepped by hand against the modeled engine."""

from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

from engine.interface import SequenceFailure, StepResult, TokenLogprobs
from engine.step_time.cost import StepCost, StepWork
from engine.step_time.model import StepTimeModel
from scheduler.holdings.claims import PREFETCH
from scheduler.holdings.report import MAX_UNSENT_LOGPROBS, REPORT_S
from scheduler.request import Claimed, Delivery, EventKind, Lease, TokenEvent
from scheduler.request_state import Status
from scheduler.virtual_time import EPOCH_MS
from tests.scheduler.builders import (
    FAST,
    MAX_PREEMPTIONS,
    expected_tokens,
    fixed,
    make_core,
    make_info,
    make_request,
    make_tiers,
    preempted,
    ran,
)
from tests.scheduler.stepped_core import SteppedCore, run_now


def small(num_blocks: int = 16) -> SteppedCore:
    """A core whose engine holds 16 tokens in each of `num_blocks` blocks."""
    return SteppedCore(make_core(info=make_info(num_blocks=num_blocks, max_model_len=16 * num_blocks)))


# -- reaction ----------------------------------------------------------------------------------------------------------


def test_bulk_pauses_with_its_kv_on_the_device_and_resumes_in_order() -> None:
    stepped = SteppedCore()
    stepped.accept(*(make_request(f"b{i}", "bulk", max_tokens=50) for i in range(4)))
    for _ in range(3):
        stepped.step()
    used = stepped.engine.num_used_blocks
    stepped.accept(make_request("rt", prompt=16, max_tokens=4))
    stepped.step()
    assert stepped.core.status(stepped.now).held["bulk"].paused == 4
    assert stepped.engine.num_used_blocks == used + 1, "nothing of bulk was freed"
    assert ran(stepped.step()) == {"rt": 1}, "few decodes without bulk are known yet"
    plan = stepped.step()
    assert plan.resume == ("b0", "b1", "b2", "b3")
    assert ran(plan) == {"rt": 1, "b0": 1, "b1": 1, "b2": 1, "b3": 1}
    stepped.run()
    assert all(stepped.tokens(f"b{i}") == expected_tokens(stepped.core.life(f"b{i}").request) for i in range(4))


def test_bulk_goes_on_while_a_grammar_is_compiled_and_owes_nothing_for_that_time() -> None:
    stepped = SteppedCore()
    stepped.accept(*(make_request(f"b{i}", "bulk", max_tokens=50) for i in range(4)))
    stepped.step()
    stepped.accept(make_request("rt", prompt=16, max_tokens=3, grammar="{}"))
    for _ in range(5):
        assert len(ran(stepped.step())) == 4
    stepped.core.note_compiled("rt", object())
    assert stepped.core.running.accounts.left_s([stepped.core.life("rt")]) == 0


# -- preemption never changes the output -------------------------------------------------------------------------------


def test_a_victim_is_computed_again_and_its_output_is_the_same() -> None:
    """Law 9."""
    stepped = small()
    bulk = make_request("b", "bulk", prompt=100, max_tokens=60)
    stepped.accept(bulk)
    for _ in range(20):
        stepped.step()
    stepped.accept(make_request("rt", prompt=180, max_tokens=5))
    plan = stepped.step()
    assert preempted(plan) == {"b": "recompute"}
    assert stepped.core.planner.preemptions == {("bulk", "recompute"): 1}
    stepped.run()
    assert stepped.tokens("b") == expected_tokens(bulk)
    sent = [(e.index, len(e.token_ids)) for e in stepped.events if e.request_id == "b"]
    assert [index for index, _ in sent] == [sum(n for _, n in sent[:i]) for i in range(len(sent))], "no token twice"
    assert sum(n for _, n in sent) == 60


def test_a_stream_without_an_slo_gets_its_tokens_a_few_at_a_time() -> None:
    stepped = SteppedCore()
    stepped.accept(make_request("b", "bulk", max_tokens=40), make_request("rt", max_tokens=40))
    stepped.run()
    events = {name: [e for e in stepped.events if e.request_id == name] for name in ("b", "rt")}
    assert len(events["rt"]) == 40
    assert len(events["b"]) < 20
    assert len(events["b"][0].token_ids) == 1, "the first token is sent at once"
    assert len(stepped.tokens("b")) == 40


@pytest.mark.trap(3)
def test_a_victim_stays_held_and_loses_its_kv_a_bounded_number_of_times() -> None:
    """Trap 3: a preempted request is never dropped by a limit, keeps its lease, and is spared in the end."""
    stepped = small()
    bulk = make_request("b", "bulk", prompt=150, max_tokens=60)
    stepped.accept(bulk)
    stepped.step()
    for i in range(6):
        stepped.accept(make_request(f"rt{i}", prompt=180, max_tokens=2))
        for _ in range(6):
            stepped.step()
        assert "b" in stepped.core.held.table.states
        assert stepped.core.held.table.states["b"].lease == Lease("b", 1)
    stepped.run()
    assert stepped.core.life("b").num_preemptions == MAX_PREEMPTIONS
    assert stepped.tokens("b") == expected_tokens(bulk)
    assert stepped.core.held.counts["finished"] == 7


# -- swap --------------------------------------------------------------------------------------------------------------


def swapping(
    num_swap_blocks: int = 16, swap_block_s: float = 1e-4, step_time: StepTimeModel | None = None
) -> SteppedCore:
    info = make_info(
        num_blocks=16,
        max_model_len=256,
        preemption_modes=("pause", "swap", "recompute"),
        num_swap_blocks=num_swap_blocks,
        swap_block_s=swap_block_s,
    )
    return SteppedCore(make_core(info=info, step_time=step_time))


def test_a_victim_is_swapped_where_that_is_cheaper_and_resumes_where_it_was() -> None:
    stepped = swapping()
    bulk = make_request("b", "bulk", prompt=100, max_tokens=60)
    stepped.accept(bulk)
    for _ in range(20):
        stepped.step()
    stepped.accept(make_request("rt", prompt=180, max_tokens=5))
    assert preempted(stepped.step()) == {"b": "swap"}
    assert stepped.core.planner.preemptions == {("bulk", "swap"): 1}
    assert (stepped.core.life("b").status, stepped.engine.num_used_swap_blocks) == (Status.SWAPPED, 8)
    while stepped.core.life("b").status is Status.SWAPPED:
        plan = stepped.step()
    assert (plan.resume, ran(plan)["b"]) == (("b",), 1), "no token is computed again"
    assert stepped.engine.num_used_swap_blocks == 0
    stepped.run()
    assert stepped.tokens("b") == expected_tokens(bulk)


def test_steps_that_copy_blocks_do_not_train_the_step_time_model() -> None:
    stepped = swapping(swap_block_s=1e-3, step_time=StepTimeModel(FAST))
    stepped.accept(make_request("b", "bulk", prompt=100, max_tokens=60))
    stepped.step()
    observed = stepped.core.step_time.num_observed
    stepped.accept(make_request("rt", prompt=180, max_tokens=1))
    assert preempted(stepped.step()) == {"b": "swap"}
    assert stepped.step().resume == ("b",)
    assert stepped.core.step_time.num_observed == observed
    stepped.step()
    assert stepped.core.step_time.num_observed == observed + 1


# -- the prefix cache --------------------------------------------------------------------------------------------------


class _Remembering(StepTimeModel):
    def __init__(self, prior: StepCost) -> None:
        super().__init__(prior)
        self.works: list[StepWork] = []

    def observe(self, work: StepWork, elapsed_s: float) -> None:
        self.works.append(work)


def test_cached_tokens_are_reported_and_count_as_no_work() -> None:
    step_time = _Remembering(FAST)
    stepped = SteppedCore(make_core(step_time=step_time), prefix_cache=True)
    stepped.accept(make_request("first", prompt=100, max_tokens=2))
    stepped.run()
    stepped.accept(make_request("second", prompt=100, max_tokens=2), make_request("third", prompt=97, max_tokens=1))
    stepped.run()
    assert [(work.prefill_tokens, work.decodes) for work in step_time.works] == [(100, 0), (0, 1), (4, 1), (0, 1)]
    cached = {e.request_id: e.cached_tokens for e in stepped.events}
    assert cached == {"first": 0, "second": 96, "third": 96}
    assert all(e.cached_tokens == cached[e.request_id] for e in stepped.events)
    lookups = [lookup for report in stepped.reports for lookup in report.lookups]
    assert [(lk.queried_tokens, lk.hit_tokens) for lk in lookups] == [(100, 0), (97, 96), (100, 96)]


def test_the_kv_reserve_is_reported_in_blocks() -> None:
    core = make_core(info=make_info(num_blocks=18))
    assert core.status(0.0).kv_reserve_blocks == core.explain(0.0)["kv_reserve_blocks"] == 5


def test_shared_blocks_of_cancelled_sequences_do_not_count_as_free() -> None:
    """Two bulk sequences hold 10 of 24 blocks: they share 8, and have one each."""
    stepped = SteppedCore(make_core(info=make_info(num_blocks=24, max_model_len=288)), prefix_cache=True)
    stepped.accept(make_request("b0", "bulk", prompt=130, max_tokens=14))
    while stepped.core.life("b0").awaits_first_token:
        stepped.step()
    stepped.accept(make_request("b1", "bulk", prompt=130, max_tokens=14))
    stepped.submit()
    stepped.core.held.cancel(["b0"])  # during the step in which the other one begins to share
    stepped.collect()
    stepped.accept(make_request("rt", prompt=256, max_tokens=2, cache_salt="x"))
    plan = stepped.step()
    assert plan.abort == ("b0",)
    assert preempted(plan) == {"b1": "recompute"}
    stepped.run()
    assert stepped.core.held.counts["finished"] == 2


# -- cancel ------------------------------------------------------------------------------------------------------------


def test_a_sequence_that_ends_before_its_abort_is_not_aborted() -> None:
    stepped = SteppedCore()
    stepped.accept(make_request("last", max_tokens=1))
    stepped.submit()
    stepped.core.held.cancel(["last"])
    report = stepped.collect()
    assert not report.events and not report.leases
    assert stepped.step().is_empty


@pytest.mark.trap(6)
def test_blocks_of_cancelled_sequences_are_used_before_any_preemption() -> None:
    """Trap 6: these blocks count as free, since a plan's aborts come first."""
    stepped = small()
    stepped.accept(make_request("gone", "bulk", prompt=120), make_request("stays", "bulk", prompt=90))
    for _ in range(2):
        stepped.step()
    stepped.core.held.cancel(["gone"])
    stepped.accept(make_request("rt", prompt=100))
    plan = stepped.step()
    assert "rt" in ran(plan)
    assert "recompute" not in preempted(plan).values()


def test_a_request_dropped_and_claimed_again_during_one_step_starts_afresh() -> None:
    """Its lease was lost and it was requeued meanwhile: the output of that step belongs to the old sequence."""
    stepped = SteppedCore()
    request = make_request("r", max_tokens=6)
    stepped.accept(request)
    stepped.step()
    stepped.submit()
    stepped.core.held.cancel(["r"])
    stepped.accept(request)
    stepped.collect()
    assert stepped.core.life("r").output_token_ids == []
    stepped.run()
    sent = [(e.index, e.token_ids) for e in stepped.events]
    assert [index for index, _ in sent] == [0, 0, 1, 2, 3, 4, 5]
    assert [t for _, tokens in sent[1:] for t in tokens] == expected_tokens(request)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_whole_answer_comes_in_few_events_and_its_first_token_at_once(is_whole: bool) -> None:
    stepped = SteppedCore()
    request = make_request("r", max_tokens=60, is_whole=is_whole)
    stepped.accept(request)
    times_s = list[float]()
    while not (stepped.reports and stepped.reports[-1].leases):
        stepped.step()
        times_s += [stepped.now] * len(stepped.reports[-1].events["gateway"])
    assert [token for event in stepped.events for token in event.token_ids] == expected_tokens(request)
    assert len(stepped.events[0].token_ids) == 1
    gaps_s = [later - earlier for earlier, later in pairwise(times_s[:-1])]
    assert (min(gaps_s) >= REPORT_S) is is_whole
    assert max(gaps_s) < REPORT_S + 0.02, "about a step later"


def test_a_held_request_that_is_claimed_again_goes_on_under_the_newer_lease() -> None:
    """Its gateway has received nothing yet, so there is no other place to go on from."""
    stepped = SteppedCore()
    stepped.accept(make_request("r", max_tokens=4, delivery=Delivery.AT_END))
    stepped.step()
    stepped.core.held.accept(
        [Claimed(stepped.core.life("r").request, fence=9, attempt=2)], stepped.now, stepped.wall_ms
    )
    assert [state.lease for state in stepped.core.held.states] == [Lease("r", 9)]
    stepped.run()
    assert stepped.reports[-1].leases == [Lease("r", 9)]
    assert stepped.core.held.counts["accepted"] == 1


def test_a_held_request_that_is_claimed_again_goes_on_from_what_its_gateway_has_received() -> None:
    stepped = SteppedCore()
    stepped.accept(make_request("r", max_tokens=6))
    for _ in range(3):
        stepped.step()
    request = stepped.core.life("r").request
    continued = Claimed(request, 9, 2, output_token_ids=(7, 8, 9), num_received=2)
    stepped.core.held.accept([continued], stepped.now, stepped.wall_ms)
    stepped.run()
    events = [e for report in stepped.reports for e in report.events["gateway"] if e.fence == 9]
    assert [token for event in events for token in event.token_ids][0] == 9 and events[0].index == 2
    assert events[-1].index + len(events[-1].token_ids) == 6
    assert stepped.reports[-1].leases == [Lease("r", 9)]


# -- requests that can never run ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"prompt": 0}, "A prompt of 0 tokens does not fit: the engine holds 1 to 255."),
        ({"prompt": 256}, "A prompt of 256 tokens does not fit: the engine holds 1 to 255."),
        ({"prompt": [1000]}, "The prompt has token ids outside the vocabulary of 1000."),
        ({"prompt": [-1]}, "The prompt has token ids outside the vocabulary of 1000."),
        ({"max_tokens": 0}, "There is nothing to generate: max_tokens is below 1."),
        ({"adapter": "mine"}, "The worker's engine has no adapter 'mine'."),
        ({"chat": "{}"}, "The worker's engine takes no images."),
    ],
)
def test_a_request_that_can_never_run_fails_with_the_reason_and_others_run(bad: dict[str, object], reason: str) -> None:
    stepped = small()
    stepped.accept(make_request("bad", **bad), make_request("good"))  # type: ignore[arg-type]
    event = stepped.events[0]
    assert (event.request_id, event.kind, event.error) == ("bad", EventKind.FAILED, reason)
    assert stepped.reports[0].leases == [Lease("bad", 1)]
    stepped.run()
    assert stepped.core.held.counts == {"accepted": 2, "failed": 1, "finished": 1}


# -- reports -----------------------------------------------------------------------------------------------------------


def test_latencies_count_from_the_arrival_at_the_gateway() -> None:
    stepped = SteppedCore()
    stepped.now = 10.0
    stepped.accept(make_request("r", max_tokens=2, arrival_ms=EPOCH_MS + 9_900))
    stepped.run()
    samples = {s.kind: s.seconds for report in stepped.reports for s in report.samples}
    first_s, second_s = (result.elapsed_s for result in stepped.core.results)
    assert samples == {
        "queue": pytest.approx(0.1),
        "ttft": pytest.approx(0.1 + first_s),
        "service": pytest.approx(first_s),
        "itl": pytest.approx(second_s),
        "e2e": pytest.approx(0.1 + first_s + second_s),
    }


def test_a_broken_sequence_fails_alone_and_counts_as_a_miss() -> None:
    core = make_core()
    core.held.accept([Claimed(make_request("bad"), 1), Claimed(make_request("good"), 2)], 0.0, EPOCH_MS)
    plan = core.plan(0.0)
    core.life("bad").first_token_s = 0.0
    failure = SequenceFailure("bad", "NaN in the logits")
    report = super(type(core), core).apply(StepResult(plan.step_id, (), (failure,), 400), 0.01)
    [event] = report.events["gateway"]
    assert (event.request_id, event.kind, event.error) == ("bad", EventKind.FAILED, "NaN in the logits")
    assert report.leases == [Lease("bad", 1)]
    assert [(e.reason, e.met_slo) for e in report.ended] == [("failed", False)]
    assert "good" in core.held.table.states and "bad" not in core.held.table.states


# -- claims ------------------------------------------------------------------------------------------------------------


@pytest.mark.trap(10, 15)
def test_claims_stay_shallow_and_n_counts_as_n() -> None:
    """Traps 10 and 15: held requests are bounded by the slots, and each of n sequences takes one."""
    tiers = make_tiers(realtime={"batch_size": fixed(8)}, bulk={"batch_size": fixed(6)})
    stepped = SteppedCore(make_core(tiers))
    assert stepped.core.claim_limits(0.0) == {"realtime": 8 + PREFETCH, "bulk": 6, "batch": 64}
    stepped.accept(*(make_request(f"choice {i}") for i in range(3)))
    assert stepped.core.claim_limits(0.0)["realtime"] == 8 + PREFETCH - 3
    stepped.accept(*(make_request(f"more {i}") for i in range(9)))
    assert stepped.core.claim_limits(0.0)["realtime"] == 0


@pytest.mark.trap(7)
def test_a_bulk_tier_at_its_limits_never_stops_interactive_claims() -> None:
    """Trap 7."""
    tiers = make_tiers(bulk={"batch_size": fixed(2)})
    stepped = SteppedCore(make_core(tiers, make_info(num_blocks=16, max_model_len=256)))
    stepped.accept(make_request("b0", "bulk", prompt=120), make_request("b1", "bulk", prompt=120))
    for _ in range(4):
        stepped.step()
    assert stepped.core.kv_usage > 0.9
    limits = stepped.core.claim_limits(stepped.now)
    assert limits["realtime"] == 64 + PREFETCH
    assert "bulk" not in limits


def test_release_gives_back_requests_that_were_refused_but_not_reported() -> None:
    core = make_core()
    core.held.accept([Claimed(make_request("bad", prompt=0), fence=1)], 0.0, EPOCH_MS)
    assert core.held.release_all() == [Lease("bad", 1)]
    assert not core.held.refuse(0.0).leases


# -- log probabilities -------------------------------------------------------------------------------------------------


def scored(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id, -float(token_id)) for token_id in token_ids)


def step_scored(stepped: SteppedCore, after_s: float = 0.0, prompt: tuple[int, ...] = ()) -> list[TokenEvent]:
    """Step a single sequence whose engine also gives log probabilities; return the events."""
    stepped.submit()
    result = run_now(stepped.engine.collect())
    stepped.now += after_s
    (output,) = result.outputs
    output = structs.replace(output, logprobs=scored(*output.token_ids), prompt_logprobs=scored(*prompt))
    report = stepped.core.apply(replace(result, outputs=(output,)), stepped.now)
    return [event for events in report.events.values() for event in events]


def test_delivery_at_the_end_comes_in_parts_if_it_has_many_log_probabilities() -> None:
    stepped = SteppedCore()
    num_top = MAX_UNSENT_LOGPROBS // 2  # so that two tokens are a part
    stepped.accept(make_request("r", "bulk", max_tokens=5, delivery=Delivery.AT_END, logprobs=num_top))
    events = [event for _ in range(5) for event in step_scored(stepped)]
    assert [(e.kind, e.index, len(e.token_ids), len(e.logprobs)) for e in events] == [
        (EventKind.TOKENS, 0, 2, 2),
        (EventKind.TOKENS, 2, 2, 2),
        (EventKind.FINISHED, 4, 1, 1),
    ]


def test_log_probabilities_go_out_once_and_with_their_tokens() -> None:
    """Those of the prompt wait for the first token; a bulk stream's wait with its tokens for the next report."""
    stepped = SteppedCore()
    stepped.accept(make_request("b", "bulk", prompt=4, max_tokens=9))
    (first,) = step_scored(stepped, prompt=(1, 2, 3))
    assert first.logprobs == scored(*first.token_ids)
    assert first.prompt_logprobs == scored(1, 2, 3)
    assert step_scored(stepped) == []
    (later,) = step_scored(stepped, after_s=1.0)
    assert (later.index, len(later.token_ids), later.prompt_logprobs) == (1, 2, ())
    assert later.logprobs == scored(*later.token_ids)
