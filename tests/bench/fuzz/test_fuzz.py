"""The parts of the fuzzing: parsers take any bytes, and what a server holds more than before is named."""

import json

import pytest

from bench.fuzz.leaks import SPARE, Held
from bench.fuzz.parsers import MAX_FILE_BYTES, PARSERS

FORM = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%s\r\n--XX--\r\n'


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"{", b"[]", json.dumps({"model": "m", "messages": []}).encode(), b'{"prompt": "\\ud800"}'],
)
def test_no_bytes_are_a_failure_of_the_json_parser(data: bytes) -> None:
    PARSERS["json"](data)


@pytest.mark.parametrize("content", [b"", b"a", b"a" * (MAX_FILE_BYTES + 1), b"\r\n--X"])
@pytest.mark.parametrize("size", [b"\x00", b"\xff"])
def test_no_bytes_are_a_failure_of_the_form_parser(content: bytes, size: bytes) -> None:
    PARSERS["multipart"](size + FORM % content)
    PARSERS["multipart"](size + (FORM % content)[:-5])


def test_what_grows_is_named() -> None:
    before = Held({"gateway": 30}, {"gateway": 5}, {"sequence": 1})
    assert Held({"gateway": 30 + SPARE}, {"gateway": 5}, {"sequence": 1, "file": 9}).growth(before) == []
    leaked = Held({"gateway": 31 + SPARE}, {"gateway": 6 + SPARE}, {"sequence": 1, "lease": 1}).growth(before)
    assert leaked == [
        f"descriptors of gateway: 30 → {31 + SPARE}",
        f"threads of gateway: 5 → {6 + SPARE}",
        "keys without a lifetime: lease",
    ]
