"""Bytes and operations of a step, against counts made by hand."""

from dataclasses import replace

import pytest

from bench.engines.roofline import ModelShape, Peaks, decode_step, job_roofline_s
from bench.engines.work import Job
from loadtest.model_shapes import SHAPE_NAMES, shape_config

# 1 layer, hidden 4, one head of 4, MLP of 8, vocabulary 10: 4·(4+4+4+4) + 3·4·8 = 160 numbers, and 40 for logits.
SMALL = ModelShape(
    hidden=4, intermediate=8, layers=1, heads=1, kv_heads=1, head_dim=4, vocab=10, number_bytes=2
)  # fmt: skip


def test_a_decode_step_reads_all_weights_once_and_each_sequences_context() -> None:
    assert (SMALL.layer_weights, SMALL.head_weights, SMALL.kv_token_bytes) == (160, 40, 16)
    needs = decode_step(streams=3, context=5)
    assert needs.num_bytes(SMALL) == 2 * 200 + 16 * 15
    assert needs.num_flops(SMALL) == 2 * 3 * 200 + 4 * 15 * 4


def test_a_file_of_quantised_weights_is_read_but_for_an_embedding_table() -> None:
    tied = replace(SMALL, file_bytes=100)
    assert tied.read_bytes == 100
    assert replace(tied, ties_embeddings=False).read_bytes == pytest.approx(100 * 200 / 240)
    assert tied.kv_token_bytes == SMALL.kv_token_bytes


def test_the_longer_of_the_two_times_is_the_roofline() -> None:
    needs = decode_step(1, 0)
    assert needs.roofline_s(SMALL, Peaks(bytes_per_s=400.0, flops_per_s=1e9)) == pytest.approx(1.0)
    assert needs.roofline_s(SMALL, Peaks(bytes_per_s=1e9, flops_per_s=400.0)) == pytest.approx(1.0)


def test_a_job_is_its_prompts_in_one_step_and_then_one_step_a_token() -> None:
    peaks = Peaks(bytes_per_s=1.0, flops_per_s=1e12)  # only bytes count
    job = Job(prompts=((1, 2, 3), (4,)), new_tokens=(1, 3))
    weights = 2 * 200
    prompts, second, third = weights + 16 * 4, weights + 16 * 2, weights + 16 * 3
    assert job_roofline_s(job, SMALL, peaks) == pytest.approx(prompts + second + third)


@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_every_shape_that_can_be_asked_for_has_a_roofline(name: str) -> None:
    config = shape_config(name)
    assert ModelShape.from_config(config, "float32") is not None
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0


def test_a_model_of_another_kind_has_none() -> None:
    assert ModelShape.from_config({"n_embd": 32, "n_layer": 2}, "bfloat16") is None
    assert ModelShape.from_config(shape_config("135m") | {"num_local_experts": 8}, "bfloat16") is None
