import json
from typing import Any

import msgspec
import pytest

from engine.interface import SamplingParams
from engine.streaming import StreamRequest, UpstreamRefused, options_of
from engine.upstream.bodies import body_of, can_continue
from engine.upstream.dialects import DIALECTS, LLAMA_CPP, PLAIN, SGLANG, VLLM, Dialect, recognise

SCHEMA = json.dumps({"grammars": [{"name": "output", "json_schema": {"type": "object", "x-guidance": {}}}]})
LARK = json.dumps({"grammars": [{"name": "output", "lark_grammar": 'start: "a"'}]})
# A value other than the default for each sampling parameter that a dialect may know.
VALUES: dict[str, Any] = {
    "top_p": 0.5,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": ((5, 1.0),),
    "allowed_token_ids": (5, 6),
    "bad_words": ((5, 6),),
    "min_tokens": 3,
    "stop_token_ids": (9,),
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "grammar": SCHEMA,
    "adapter": "mine",
}


def body(dialect: Dialect, output: tuple[int, ...] = (), is_seeded: bool = False, **sampling: Any) -> dict[str, Any]:
    params = SamplingParams(max_tokens=10, seed=3, **sampling)
    sent = StreamRequest("r", (1, 2), params, "salt", 100, is_seeded, output)
    return body_of(sent, dialect, "m", [1, 2, *output])


def test_every_sampling_parameter_has_a_value_here() -> None:
    general = {"max_tokens", "temperature", "seed"}
    assert {f.name for f in msgspec.structs.fields(SamplingParams)} == VALUES.keys() | general


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda d: d.name)
@pytest.mark.parametrize("name", VALUES)
def test_each_parameter_is_either_sent_or_named_as_unsupported(dialect: Dialect, name: str) -> None:
    option = "json_schema" if name == "grammar" else name
    sampling = SamplingParams(10, **{name: VALUES[name]})
    assert options_of(sampling) == {option}
    if option in dialect.unsupported:
        return
    assert body(dialect, is_seeded=True, **{name: VALUES[name]}) != body(dialect, is_seeded=True)


def test_parameters_have_the_names_of_the_dialect() -> None:
    vllm = body(VLLM, logit_bias=((5, 1.0),), top_k=7, logprobs=2, grammar=SCHEMA)
    assert vllm["logit_bias"] == {"5": 1.0} and vllm["top_k"] == 7 and vllm["logprobs"] == 2
    schema = {"json": {"type": "object"}, "disable_any_whitespace": True}
    assert vllm["structured_outputs"] == schema and vllm["return_tokens_as_token_ids"]
    sglang = body(SGLANG, min_tokens=3, is_seeded=True)
    assert sglang["input_ids"] == [1, 2] and sglang["extra_key"] == "salt" and sglang["priority"] == 100
    assert sglang["sampling_params"] == {
        "max_new_tokens": 10,
        "temperature": 1.0,
        "sampling_seed": 3,
        "min_new_tokens": 3,
    }
    llama = body(LLAMA_CPP, logit_bias=((5, 1.0),), repetition_penalty=1.2)
    assert llama["logit_bias"] == [[5, 1.0]] and llama["repeat_penalty"] == 1.2 and llama["n_predict"] == 10
    assert llama["cache_prompt"] is False, "a server without salts must not share prompts between callers"
    assert (llama["top_k"], llama["top_p"], llama["min_p"]) == (0, 1.0, 0.0), "its own defaults are others"


def test_a_seed_is_sent_if_the_caller_chose_it_or_it_lets_an_answer_begin_again() -> None:
    assert "seed" not in body(VLLM), "it is continued from its tokens, and servers sample slower with a seed"
    assert body(VLLM, is_seeded=True)["seed"] == 3
    assert body(VLLM, presence_penalty=0.5)["seed"] == body(LLAMA_CPP, presence_penalty=0.5)["seed"] == 3
    assert "sampling_seed" not in body(SGLANG, presence_penalty=0.5)["sampling_params"] and "seed" not in body(PLAIN)
    assert body(PLAIN, is_seeded=True)["seed"] == 3
    assert "seed" not in body(VLLM, output=(7, 8)), "the random numbers of the beginning must not come again"


def test_a_continuation_asks_for_what_is_left() -> None:
    left = body(VLLM, output=(7, 8), min_tokens=3)
    assert (left["max_tokens"], left["min_tokens"], left["prompt"]) == (8, 1, [1, 2, 7, 8])


def test_grammars_that_are_no_schema_are_refused() -> None:
    assert options_of(SamplingParams(1, grammar=LARK)) == {"grammar"}
    assert all("grammar" in dialect.unsupported for dialect in DIALECTS.values())
    with pytest.raises(UpstreamRefused):
        body(VLLM, grammar=LARK)
    with pytest.raises(UpstreamRefused):
        body(PLAIN, grammar=SCHEMA)


@pytest.mark.parametrize("name", VALUES)
def test_only_what_does_not_depend_on_the_output_is_continued(name: str) -> None:
    depends = {"presence_penalty", "frequency_penalty", "bad_words", "logprobs", "prompt_logprobs", "grammar"}
    assert can_continue(SamplingParams(10, **{name: VALUES[name]}), False) is (name not in depends)


def test_a_chosen_seed_is_kept_unless_decoding_is_greedy() -> None:
    assert not can_continue(SamplingParams(10), True)
    assert can_continue(SamplingParams(10, temperature=0.0), True)


def test_servers_are_recognised_by_who_owns_their_models() -> None:
    names = [recognise(owner).name for owner in ("vllm", "sglang", "llamacpp", "tidegate", "library", "")]
    assert names == ["vllm", "sglang", "llama.cpp", "vllm", "plain", "plain"]
