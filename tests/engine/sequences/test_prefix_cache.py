"""The prefix cache: digests, and which block is evicted first."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.sequences.prefix_cache import PrefixCache, block_digest, root_digest


def chain(salt: str, *blocks: list[int]) -> list[bytes]:
    digests = [root_digest(salt)]
    for block in blocks:
        digests.append(block_digest(digests[-1], array("q", block)))
    return digests[1:]


TEXTS = st.tuples(
    st.sampled_from(["", "a", "b", "ab"]), st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), max_size=3)
)


@given(TEXTS, TEXTS)
def test_digests_are_equal_where_salt_and_all_tokens_so_far_are(
    one: tuple[str, list[list[int]]], other: tuple[str, list[list[int]]]
) -> None:
    first, second = chain(one[0], *one[1]), chain(other[0], *other[1])
    for i, (a, b) in enumerate(zip(first, second, strict=False), 1):
        assert (a == b) == (one[0] == other[0] and one[1][:i] == other[1][:i])


def idle_cache(*blocks: tuple[int, int]) -> PrefixCache:
    """Return a cache of idle blocks (block, retention); the first one is the least recently used."""
    cache = PrefixCache()
    for block, retention in blocks:
        cache.add(block, b"%d" % block, retention)
        cache.mark_idle(block)
    return cache


def test_the_lowest_retention_is_evicted_first_then_the_least_recently_used() -> None:
    cache = idle_cache((1, 100), (2, 10), (3, 0), (4, 10), (5, 0))
    assert [cache.evict() for _ in range(5)] == [3, 5, 2, 4, 1]
    assert (len(cache), cache.num_idle) == (0, 0)


def test_use_makes_a_block_recent() -> None:
    cache = idle_cache((1, 0), (2, 0))
    cache.mark_in_use(1)
    cache.mark_idle(1)
    assert cache.evict() == 2


def test_a_hit_raises_a_blocks_retention_and_never_lowers_it() -> None:
    cache = idle_cache((1, 0), (2, 50))
    cache.mark_in_use(1)
    cache.raise_retention(1, 100)
    cache.raise_retention(1, 10)
    cache.mark_idle(1)
    assert cache.evict() == 2


def test_the_first_of_two_blocks_with_equal_contents_stays() -> None:
    cache = PrefixCache()
    cache.add(1, b"same", 0)
    cache.add(2, b"same", 0)
    assert cache.find(b"same") == 1
    assert 2 not in cache
    cache.forget(2)
    assert cache.find(b"same") == 1


def test_a_forgotten_block_is_not_found() -> None:
    cache = PrefixCache()
    cache.add(1, b"broken", 0)
    cache.forget(1)
    assert cache.find(b"broken") is None
    assert 1 not in cache and len(cache) == 0
