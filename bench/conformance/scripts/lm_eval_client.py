"""lm-eval: scores of `local-completions` against those of its own `hf`, which loads the same weights.

Needs the demo model in float32. Continuations are what the model itself answers, so that an end-of-sequence follows
them, and wrong answers of the same length.
"""

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import lm_eval
import requests
from checks import BASE_URL, MODEL, check, main
from lm_eval.tasks import TaskManager

WEIGHTS = str(Path(__file__).parents[3] / "demo_model" / "weights")
TOLERANCE = 2e-4  # of a token's log probability: two orders of the same sums in float32
PROMPTS = ("Add 17 and 25.", "Count from 1 to 9", "Repeat: k7Qz-09ab", "What is a tier?", "Add 40 and 3.", "Hello!")
CHOICES = """\
task: tidegate_choices
dataset_path: json
dataset_kwargs: {data_files: {test: CHOICES}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""
TEXTS = """\
task: tidegate_texts
dataset_path: json
dataset_kwargs: {data_files: {test: TEXTS}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


def answer(prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 64}
    response = requests.post(f"{BASE_URL}/completions", json=body, timeout=60)
    response.raise_for_status()
    return str(response.json()["choices"][0]["text"])


@cache
def tasks() -> Path:
    """Return the folder of the two tasks: each has a description in YAML and its documents in JSON lines."""
    folder = Path(tempfile.mkdtemp(prefix="lm-eval-"))
    answers = {f"{prompt}\n": answer(f"{prompt}\n") for prompt in PROMPTS}
    choices = [{"context": c, "choices": [text, *("41", "42", "43", "no")]} for c, text in answers.items()]
    texts = [{"text": context + text} for context, text in answers.items()]
    for name, task, documents in (("CHOICES", CHOICES, choices), ("TEXTS", TEXTS, texts)):
        data = folder / f"{name.lower()}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        (folder / f"{name.lower()}.yaml").write_text(task.replace(f"test: {name}", f"test: {data}"))
    return folder


@cache
def scores(model: str, task: str) -> list[tuple[float, ...]]:
    """Return the log-likelihoods, with greediness for continuations, of each document of `task`."""
    arguments = {
        "hf": {"pretrained": WEIGHTS, "dtype": "float32", "device": "cpu"},
        "local-completions": {
            **{"model": MODEL, "base_url": f"{BASE_URL}/completions", "tokenizer": WEIGHTS},
            # With the server's own /tokenizer_info, lm-eval 0.4.13 takes a bos_token_id of 0 for none, unlike its hf.
            "tokenizer_backend": "huggingface",
            **{"num_concurrent": 4, "max_retries": 1, "tokenized_requests": True},
        },
    }
    manager = TaskManager(include_path=str(tasks()), include_defaults=False)
    found: Any = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments[model],
        tasks=[task],
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [tuple(value) for sample in samples for value in _flat(sample["filtered_resps"])]


def _flat(responses: Any) -> list[tuple[float, ...]]:
    return [tuple(r) if isinstance(r, (list, tuple)) else (float(r),) for r in responses]


def compare(task: str) -> None:
    ours, theirs = scores("local-completions", task), scores("hf", task)
    assert len(ours) == len(theirs) > 0
    wrong = [
        (a, b)
        for a, b in zip(ours, theirs, strict=True)
        if not math.isclose(a[0], b[0], rel_tol=TOLERANCE, abs_tol=TOLERANCE) or a[1:] != b[1:]
    ]
    assert not wrong, f"{len(wrong)} of {len(ours)} differ from hf: {wrong[:3]}"


@check
def continuations() -> None:
    """log-likelihoods of continuations are those of hf"""
    compare("tidegate_choices")


@check
def whole_texts() -> None:
    """rolling log-likelihoods are those of hf"""
    compare("tidegate_texts")


main()
