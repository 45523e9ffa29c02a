"""The events of a request as they reach its stream: in order, once, and from one generation."""

import msgspec
import pytest

from engine.interface import FinishReason, TokenLogprobs
from scheduler.client.token_stream import TokenStream
from scheduler.queue.memory import MemoryQueue
from scheduler.request import ANSWER_TOO_LARGE, Claimed, EventKind, Lease, TokenEvent
from tests.scheduler.builders import make_request
from tests.scheduler.client.stage import Stage, finished, play, received, tokens
from tests.scheduler.world import played_by


@played_by(play)
async def test_tokens_arrive_in_order_and_end_with_one_last_event(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    await stage.tell(tokens(0, 5), tokens(1, 6, 7))
    await stage.tell(finished(3, 8))
    assert await received(stream) == [tokens(0, 5), tokens(1, 6, 7), finished(3, 8)]
    assert stage.client.num_open == 0


@played_by(play)
async def test_take_returns_all_waiting_events_at_once(stage: Stage) -> None:
    async with await stage.submit(make_request("r")) as stream:
        await stage.tell(tokens(0, 5), tokens(1, 6))
        await stage.clock.sleep(0.1)
        assert await stream.receive(0.0) == [tokens(0, 5), tokens(1, 6)]
        assert await stream.receive(0.0) == []
        await stage.tell(finished(2, 7))
        assert await stream.receive() == [finished(2, 7)]
        with pytest.raises(EOFError):
            await stream.receive()


@played_by(play)
async def test_take_waits_no_longer_than_its_timeout(stage: Stage) -> None:
    async with await stage.submit(make_request("r")) as stream:
        before_s = stage.clock.now()
        assert await stream.receive(2.0) == []
        assert stage.clock.now() - before_s == pytest.approx(2.0)
    assert await stage.depth() == 0, "leaving the block early cancels the request"


@played_by(play)
async def test_repeats_after_a_requeue_are_dropped_by_their_index(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    await stage.tell(tokens(0, 5), tokens(1, 6), tokens(0, 5), tokens(1, 6, 7), finished(0, 5, 6, 7, 8))
    assert await received(stream) == [tokens(0, 5), tokens(1, 6), tokens(2, 7), finished(3, 8)]


def test_repeats_lose_their_log_probabilities_in_step_with_their_tokens() -> None:
    prompt = (TokenLogprobs(3, -1.0), TokenLogprobs(4, -2.0))

    def scored(index: int, *token_ids: int) -> TokenEvent:
        logprobs = tuple(TokenLogprobs(token_id, -float(token_id)) for token_id in token_ids)
        prompt_logprobs = () if index else prompt
        return TokenEvent("r", EventKind.TOKENS, index, token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    async def story(stage: Stage) -> None:
        stream = await stage.submit(make_request("r"))
        await stage.tell(scored(0, 5), scored(1, 6), scored(0, 5), scored(0, 5, 6, 7), finished(3, 8))
        assert await received(stream) == [scored(0, 5), scored(1, 6), scored(2, 7), finished(3, 8)]

    play(story)


def scored(index: int, count: int, of: str = "r") -> TokenEvent:
    """Return an event with `count` tokens, of which each has one log probability."""
    found = tuple(TokenLogprobs(token_id, -1.0) for token_id in range(index, index + count))
    return TokenEvent(of, EventKind.TOKENS, index, tuple(range(index, index + count)), logprobs=found)


@played_by(play)
async def test_an_answer_with_more_log_probabilities_than_fit_fails_and_its_work_is_cancelled(stage: Stage) -> None:
    async with await stage.submit(make_request("r"), make_request("s")) as stream:
        worker = stage.queue.for_worker("w")
        await worker.claim({"realtime": 2}, 10.0)
        await stage.tell(scored(0, 12), scored(0, 8, "s"))
        assert await stream.receive() == [scored(0, 12), scored(0, 8, "s")]
        await stage.tell(scored(12, 1), scored(13, 1), scored(8, 1, "s"))
        [event] = [event async for event in stream]
    assert (event.request_id, event.index) == ("r", 12)
    assert (event.kind, event.code) == (EventKind.FAILED, ANSWER_TOO_LARGE)
    assert sorted(worker.cancelled()) == ["r", "s"] and stage.client.num_open == 0


@played_by(play)
async def test_an_answer_for_which_others_leave_no_room_is_told_to_come_again(stage: Stage) -> None:
    async with await stage.submit(make_request("large")), await stage.submit(make_request("small")) as small:
        await stage.tell(scored(0, 20, "large"), scored(0, 6, "small"))
        assert await small.receive() == [scored(0, 6, "small")]
        await stage.tell(scored(6, 1, "small"))
        [refused] = await small.receive()
        assert (refused.kind, refused.code) == (EventKind.UNAVAILABLE, "")
        async with await stage.submit(make_request("next")) as after:  # what was refused has made room at once
            await stage.tell(scored(0, 6, "next"))
            assert await after.receive() == [scored(0, 6, "next")]


@pytest.mark.parametrize("other", [tokens(0, 9), tokens(1, 9), finished(0, 5, 9), tokens(3, 8)])
@played_by(play)
async def test_an_output_that_diverges_fails_and_its_work_is_cancelled(stage: Stage, other: TokenEvent) -> None:
    """A mixture of two answers, or an answer with a gap, is worse than an error."""
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    await worker.claim({"realtime": 1}, 10.0)
    await stage.tell(tokens(0, 5), tokens(1, 6))
    await stage.tell(other)
    events = await received(stream)
    assert [(e.kind, e.index) for e in events] == [
        (EventKind.TOKENS, 0),
        (EventKind.TOKENS, 1),
        (EventKind.FAILED, 2),
    ]
    assert events[-1].error == "The generation was interrupted and could not be continued."
    assert await stage.queue.cancel(["r"]) == [False], "the queue has forgotten it"
    assert worker.cancelled() == ["r"], "and the worker was told"
    assert stage.client.num_open == 0


def fenced(event: TokenEvent, fence: int) -> TokenEvent:
    return msgspec.structs.replace(event, fence=fence)


async def begun(stage: Stage) -> tuple[TokenStream, MemoryQueue, Claimed]:
    """Return the stream of a request, its worker, and its claim. The tokens 5 and 6 have come."""
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    [claimed] = await worker.claim({"realtime": 1}, 10.0)
    await stage.tell(fenced(tokens(0, 5), claimed.fence), fenced(tokens(1, 6), claimed.fence))
    return stream, worker, claimed


@pytest.mark.parametrize(
    "late", [tokens(2, 9), finished(2, 9), TokenEvent("r", EventKind.FAILED, error="…"), tokens(0, 8)]
)
@played_by(play)
async def test_events_of_a_lost_lease_change_nothing_once_another_worker_has_the_request(
    stage: Stage, late: TokenEvent
) -> None:
    stream, worker, old = await begun(stage)
    await stage.queue.requeue_worker("w")
    [new] = await worker.claim({"realtime": 1}, 10.0)
    assert new.is_taken_over
    await stage.tell(TokenEvent("r", EventKind.TAKEN_OVER, fence=new.fence), fenced(late, old.fence))
    await stage.clock.sleep(0.001)
    [continued] = await worker.claim({"realtime": 1}, 10.0)
    assert (continued.output_token_ids, continued.num_received, continued.attempt) == ((5, 6), 2, 2)
    await stage.tell(fenced(late, new.fence - 1), fenced(finished(2, 7), continued.fence))
    assert [t for event in await received(stream) for t in event.token_ids] == [5, 6, 7]
    assert worker.cancelled() == []


@pytest.mark.parametrize("late", [tokens(3, 8), finished(3, 8), tokens(1, 8), finished(0, 5, 8, 9)])
@played_by(play)
async def test_a_request_whose_tokens_do_not_follow_those_that_came_goes_on_from_these(
    stage: Stage, late: TokenEvent
) -> None:
    """The store has lost a message, because too many were waiting, or an earlier claim, in a failover."""
    stream, worker, old = await begun(stage)
    await stage.tell(fenced(late, old.fence), fenced(tokens(4, 9), old.fence))
    await stage.clock.sleep(0.001)
    [continued] = await worker.claim({"realtime": 1}, 10.0)
    assert (continued.output_token_ids, continued.num_received, continued.attempt) == ((5, 6), 2, 1)
    assert await worker.renew([Lease("r", old.fence)], 10.0) == [False]
    await stage.tell(fenced(tokens(5, 1), old.fence), fenced(finished(2, 7), continued.fence))
    assert [t for event in await received(stream) for t in event.token_ids] == [5, 6, 7]


@pytest.mark.parametrize("late", [tokens(1, 8), tokens(2, 8), finished(2, 8)])
@played_by(play)
async def test_a_new_claim_whose_first_tokens_were_lost_is_not_mixed_with_the_received_ones(
    stage: Stage, late: TokenEvent
) -> None:
    """The store has lost the claim and its first message; what comes next would fit to the received tokens."""
    stream, worker, old = await begun(stage)
    await stage.queue.requeue_worker("w")
    [new] = await worker.claim({"realtime": 1}, 10.0)
    await stage.tell(fenced(late, new.fence))
    await stage.clock.sleep(0.001)
    [continued] = await worker.claim({"realtime": 1}, 10.0)
    assert (continued.output_token_ids, continued.num_received) == ((5, 6), 2)
    await stage.tell(fenced(finished(2, 7), continued.fence))
    assert [t for event in await received(stream) for t in event.token_ids] == [5, 6, 7]


@played_by(play)
async def test_a_worker_that_contradicts_the_tokens_that_it_was_told_fails_the_request(stage: Stage) -> None:
    """An upstream that cannot continue an answer begins it again each time."""
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    for fence in (1, 2):
        await worker.claim({"realtime": 1}, 10.0)
        await stage.tell(fenced(tokens(0, 5), fence), fenced(tokens(0, 5 + fence), fence + 1))
    events = await received(stream)
    assert [(e.kind, e.token_ids) for e in events] == [(EventKind.TOKENS, (5,)), (EventKind.FAILED, ())]


@played_by(play)
async def test_a_request_whose_end_was_lost_on_the_way_fails_and_may_be_sent_again(stage: Stage) -> None:
    stream = await stage.submit(make_request("r"))
    worker = stage.queue.for_worker("w")
    [claimed] = await worker.claim({"realtime": 1}, 10.0)
    await worker.ack([Lease("r", claimed.fence)])
    await stage.tell(fenced(tokens(0, 5), claimed.fence), fenced(finished(2, 8), claimed.fence))
    events = await received(stream)
    assert [e.kind for e in events] == [EventKind.TOKENS, EventKind.UNAVAILABLE]
    assert "lost" in (events[-1].error or "")


@played_by(play)
async def test_a_request_that_has_ended_here_is_cancelled_where_it_was_taken_over(stage: Stage) -> None:
    """So is one that has all its tokens: only its end was lost."""
    ended = await stage.submit(make_request("ended"))
    whole = await stage.submit(make_request("whole", max_tokens=2))
    worker = stage.queue.for_worker("w")
    claimed = await worker.claim({"realtime": 2}, 10.0)
    await stage.tell(tokens(0, 5, 6, of="whole"), finished(0, 5, of="ended"))
    await stage.tell(*(TokenEvent(c.request.id, EventKind.TAKEN_OVER, fence=c.fence) for c in claimed))
    await stage.clock.sleep(0.001)
    assert (await received(ended))[-1].kind is EventKind.FINISHED
    assert (await received(whole))[-1].finish_reason is FinishReason.LENGTH
    assert await stage.queue.known(["ended", "whole"]) == [False, False]


@played_by(play)
async def test_n_sequences_share_one_stream_and_each_has_a_last_event(stage: Stage) -> None:
    stream = await stage.submit(make_request("a"), make_request("b"))
    await stage.tell(tokens(0, 1, of="a"), finished(0, 2, of="b"))
    await stage.tell(finished(1, 3, of="a"))
    events = await received(stream)
    assert [(e.request_id, e.kind) for e in events] == [
        ("a", EventKind.TOKENS),
        ("b", EventKind.FINISHED),
        ("a", EventKind.FINISHED),
    ]
