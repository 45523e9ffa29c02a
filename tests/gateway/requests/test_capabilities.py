import json

import pytest

from gateway.protocol.errors import ApiError
from gateway.requests.prepare.sampling import check_supported
from scheduler.registry.worker_status import WorkerStatus
from tests.scheduler.builders import make_request

LARK = json.dumps({"grammars": [{"name": "output", "lark_grammar": 'start: "a"'}]})
SCHEMA = json.dumps({"grammars": [{"name": "output", "json_schema": {}}]})


def worker(*unsupported: str) -> WorkerStatus:
    return WorkerStatus("w", ("m",), 100, 100, 0, unsupported=unsupported)


def test_what_any_worker_cannot_do_is_refused_by_name() -> None:
    request = make_request(bad_words=((1, 2),))
    check_supported([request], [worker(), worker("min_p")])
    with pytest.raises(ApiError) as caught:
        check_supported([make_request(), request], [worker(), worker("bad_words")])
    assert (caught.value.status, caught.value.param) == (400, "bad_words")


def test_grammars_are_named_as_the_parameter_that_asks_for_them() -> None:
    check_supported([make_request(grammar=SCHEMA)], [worker("grammar")])
    for grammar, name in ((LARK, "grammar"), (SCHEMA, "json_schema")):
        with pytest.raises(ApiError) as caught:
            check_supported([make_request(grammar=grammar)], [worker(name)])
        assert caught.value.param == "response_format"
