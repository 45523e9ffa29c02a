"""Traces: both formats say the same, and a bad line is named."""

from pathlib import Path

import pytest

from loadtest.simulation.traffic import TraceError, TraceRow, read_trace

JSONL = """\
{"arrival_s": 2.5, "tier": "flex", "prompt_tokens": 40, "output_tokens": 8, "deadline_s": 60}

{"arrival_s": 1, "tier": "realtime", "class": "chat", "prompt_tokens": 64, "output_tokens": 4, \
"prefix_id": "p", "prefix_tokens": 32}
"""
CSV = """\
arrival_s,tier,class,prompt_tokens,output_tokens,prefix_id,prefix_tokens,deadline_s
2.5,flex,,40,8,,,60
1,realtime,chat,64,4,p,32,
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_jsonl_and_csv_say_the_same_by_arrival(tmp_path: Path) -> None:
    rows = read_trace(written(tmp_path / "trace.jsonl", JSONL))
    assert rows == read_trace(written(tmp_path / "trace.csv", CSV))
    assert [row.arrival_s for row in rows] == [1.0, 2.5]
    assert (rows[0].traffic_class, rows[0].prefix_tokens, rows[1].deadline_s) == ("chat", 32, 60.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", ":1: not JSON"),
        ('{"arrival_s": 1, "tier": "t", "prompt_tokens": 0, "output_tokens": 1}', ":1: prompt_tokens"),
        ('{"arrival_s": -1, "tier": "t", "prompt_tokens": 1, "output_tokens": 1}', ":1: arrival_s"),
        ('{"tier": "t", "prompt_tokens": 1, "output_tokens": 1}', ":1: arrival_s: Field required"),
        ('{"arrival_s": 1, "tier": "t", "prompt_tokens": 9, "output_tokens": 1, "prefix_id": "a"}', "go together"),
        (
            '{"arrival_s": 1, "tier": "t", "prompt_tokens": 1, "output_tokens": 1,'
            ' "prefix_id": "a", "prefix_tokens": 2}',
            "a part of the prompt",
        ),
        ("", "holds no request"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(written(tmp_path / "trace.jsonl", line))


def test_a_row_knows_its_aliases() -> None:
    row = TraceRow.model_validate({"arrival_s": 0, "tier": "t", "class": "c", "prompt_tokens": 1, "output_tokens": 1})
    assert row.traffic_class == "c"
