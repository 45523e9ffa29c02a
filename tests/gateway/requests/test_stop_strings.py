"""Stop strings: the text does not depend on the pieces, and holds no part of a stop string."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gateway.requests.tokens.stop_strings import StopMatcher


def shown(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece) for piece in pieces)
    return text + matcher.flush(), matcher.matched


def expected(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """Return the expected text: the shortest prefix of `text` that ends with a stop string, without that string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


ALPHABET = st.text(alphabet="abé😀", max_size=30)
STOPS = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=5), min_size=1, max_size=4)


@given(STOPS, st.lists(st.text(alphabet="abé😀", max_size=4), max_size=15))
def test_the_split_into_pieces_does_not_matter(stops: list[str], pieces: list[str]) -> None:
    assert shown(stops, pieces) == expected(stops, "".join(pieces))


@given(STOPS, ALPHABET)
def test_nothing_is_held_back_that_cannot_become_a_stop(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(char) for char in text)
    held = matcher.flush()
    assert matcher.matched or out + held == text
    assert not held or any(stop.startswith(held) and stop != held for stop in stops)
