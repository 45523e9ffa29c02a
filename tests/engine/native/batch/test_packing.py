"""The layout of a packed step."""

import pytest

from engine.interface import EngineInfo, Run, StepPlan
from engine.native.batch.packing import in_one_group, pack_step
from engine.sequences.sequence_table import SequenceTable
from tests.engine.drive import make_new

INFO = EngineInfo(
    "none",
    max_model_len=64,
    vocab_size=100,
    block_size=4,
    num_blocks=32,
    max_step_tokens=64,
    verifies_drafts=True,
)


def make_table(**computed: int) -> SequenceTable:
    """Make sequences of 12 tokens, of which `computed` are computed. A token's id is 12 × sequence + position."""
    table = SequenceTable(INFO)
    news = [make_new(name, [12 * i + k for k in range(12)]) for i, name in enumerate(computed)]
    table.begin(StepPlan(0, start=tuple(news)))
    for name, count in computed.items():
        if count:
            (chunk,) = table.begin(StepPlan(0, run=(Run(name, count),)))
            table.advance(chunk, ())
    return table


def test_decodes_come_first_in_the_order_of_their_contexts() -> None:
    table = make_table(a=0, b=3, c=11)
    chunks = table.begin(StepPlan(1, run=(Run("a", 5), Run("b", 1), Run("c", 1))))
    batch = pack_step(chunks, INFO.block_size)
    assert batch.token_ids.tolist() == [24 + 11, 12 + 3, 0, 1, 2, 3, 4]
    assert batch.positions.tolist() == [11, 3, 0, 1, 2, 3, 4]
    assert [c.sequence.seq_id for c in batch.sampled_chunks] == ["c"]
    assert batch.logit_rows.tolist() == [0]
    b_block, *c_blocks = 0, 1, 2, 3
    a_blocks = (4, 5)
    assert batch.slot_ids.tolist() == [
        4 * c_blocks[2] + 3,
        4 * b_block + 3,
        *(4 * a_blocks[0] + k for k in range(4)),
        4 * a_blocks[1],
    ]
    (group,) = batch.decode_groups
    assert group.context_lens.tolist() == [12, 4]
    assert group.block_table.tolist() == [c_blocks, [b_block] * 3]  # padded with the sequence's own block
    (prefill,) = batch.prefill_chunks
    assert (prefill.first_row, prefill.start, prefill.end) == (2, 0, 5)
    assert batch.unfilled_blocks == (a_blocks[1],)


def test_a_draft_is_rows_of_decodes_with_contexts_of_their_own() -> None:
    table = make_table(a=11, b=11, p=0)
    runs = (Run("p", 3), Run("b", 1), Run("a", 1, (7, 8)))
    batch = pack_step(table.begin(StepPlan(1, run=runs)), INFO.block_size)
    assert batch.token_ids.tolist() == [8, 7, 12 + 11, 11, 24, 25, 26]
    assert batch.positions.tolist() == [13, 12, 11, 11, 0, 1, 2]
    (group,) = batch.decode_groups
    assert group.context_lens.tolist() == [14, 13, 12, 12]
    assert [c.sequence.seq_id for c in batch.sampled_chunks] == ["b", "a"]
    assert batch.logit_rows.tolist() == [2, 3, 1, 0]  # of "a": its own row, then those of the draft
    table_of_a = table["a"].block_table
    assert batch.slot_ids[:2].tolist() == [4 * table_of_a[3] + 1, 4 * table_of_a[3]]
    assert group.block_table[0].tolist() == list(table_of_a)


def test_the_last_row_of_a_finished_prefill_is_sampled() -> None:
    table = make_table(a=4, b=0)
    batch = pack_step(table.begin(StepPlan(1, run=(Run("b", 12), Run("a", 8)))), INFO.block_size)
    assert batch.logit_rows.tolist() == [11, 19]
    assert [c.sequence.seq_id for c in batch.sampled_chunks] == ["b", "a"]
    assert batch.decode_groups == ()


def test_decodes_are_cut_into_groups_where_padding_grows_and_merged_at_the_width_of_the_widest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.native.batch.packing._PADDED_TOKENS_WORTH_A_GROUP", 9)
    table = make_table(a=11, b=1, c=2, d=10)
    batch = pack_step(table.begin(StepPlan(1, run=tuple(Run(name, 1) for name in "abcd"))), INFO.block_size)
    assert [g.context_lens.tolist() for g in batch.decode_groups] == [[12, 11], [3, 2]]
    assert [g.first_row for g in batch.decode_groups] == [0, 2]
    one = in_one_group(batch)
    (group,) = one.decode_groups
    assert (group.first_row, group.num_rows) == (0, 4)
    assert group.context_lens.tolist() == [12, 11, 3, 2]
    assert group.block_table[:2].tolist() == batch.decode_groups[0].block_table.tolist()
    assert all(len(set(row)) == 1 for row in group.block_table[2:].tolist())  # padded with blocks of their own
    assert in_one_group(one) is one
