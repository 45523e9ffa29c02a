"""Which processes count as silent, read by read."""

from scheduler.registry.heartbeat_monitor import CHECK_S, HeartbeatMonitor

READS = 4


def monitor() -> HeartbeatMonitor:
    return HeartbeatMonitor(READS * CHECK_S)


def test_a_process_is_silent_when_its_heartbeat_has_not_changed_for_some_reads() -> None:
    watch = monitor()
    assert [watch.observe({"a": 1, "b": n}) for n in range(READS)] == [[]] * READS
    assert not watch.is_silent("a")
    assert watch.observe({"a": 1, "b": READS}) == ["a"]
    assert watch.is_silent("a") and not watch.is_silent("b")
    assert watch.observe({"a": 1, "b": READS + 1}) == [], "it is reported once"


def test_a_silent_process_that_wakes_up_is_alive_again_and_may_go_silent_again() -> None:
    watch = monitor()
    silent = [watch.observe({"a": 1}) for _ in range(READS + 1)]
    assert silent[-1] == ["a"]
    assert watch.observe({"a": 2}) == []
    assert not watch.is_silent("a")
    assert [watch.observe({"a": 2}) for _ in range(READS)] == [[]] * (READS - 1) + [["a"]]


def test_a_process_that_has_vanished_goes_silent_too_and_is_forgotten() -> None:
    watch = monitor()
    watch.observe({"a": 1, "b": 1})
    assert [watch.observe({"b": n}) for n in range(2, READS + 2)] == [[]] * (READS - 1) + [["a"]]
    assert watch.watched == {"b"}


def test_a_short_gap_in_the_store_is_no_silence() -> None:
    watch = monitor()
    watch.observe({"a": 1})
    for n in range(READS - 1):
        assert watch.observe({}) == [], n
    assert watch.observe({"a": 2}) == []
    assert not watch.is_silent("a")


def test_a_process_of_which_the_store_knows_nothing_goes_silent() -> None:
    watch = monitor()
    assert [watch.observe({"a": None}) for _ in range(READS + 1)] == [[]] * READS + [["a"]]
