"""Retry one line of a batch: create a new batch of the same owner that has only this line."""

import asyncio
import secrets
from pathlib import Path

from gateway.files.disk import noticing_full_disk
from gateway.files.storage import ContentLost
from gateway.files.store import FileStore, content_name
from gateway.jobs.batches.forecast.forecasts import Infeasible
from gateway.jobs.batches.input.lines import input_line
from gateway.jobs.batches.model import Batch, NewBatch
from gateway.jobs.batches.service import BatchService, InputProblem, TooManyBatches

LOST = InputProblem("The batch or its input file was deleted. Upload the line again, and create a batch for it.")


async def retry_line(
    batches: BatchService, files: FileStore, batch_id: str, number: int, owner: str | None, new_id: str
) -> Batch | InputProblem:
    """Create a batch for the line `number` of a batch of `owner`, and return it. `new_id` is its id without the prefix.

    A repeated call returns the same batch. Return an `InputProblem` if the line cannot be read any more. Raises
    `DiskFull`.
    """
    batch = await batches.retrieve(batch_id, owner=owner)
    file = await files.get(batch.input_file_id, owner=owner) if batch is not None else None
    if batch is None or file is None:
        return LOST
    content = files.incoming / secrets.token_hex(8)
    try:
        source = await files.storage.fetch(content_name(file.id), file.sha256)
    except ContentLost:
        return LOST
    with noticing_full_disk():
        if not await asyncio.to_thread(_copy_line, source, number, content):
            return LOST
    name, new_file_id = f"{batch_id}_line_{number}.jsonl", f"file-{new_id}"
    added = await files.add(content, filename=name, purpose="batch", owner=owner, file_id=new_file_id)
    new = NewBatch(
        input_file_id=added.id,
        endpoint=batch.endpoint,
        owner=owner,
        completion_window=batch.completion_window,
        metadata={**(batch.metadata or {}), "retry_of": batch_id},
        output_expires_after_s=batch.output_expires_after_s,
        best_effort=True,  # a line that an operator retries is not refused
    )
    created = await batches.create(new, new_id, is_limited=False)
    assert not isinstance(created, (Infeasible, TooManyBatches))
    return created


def _copy_line(source: Path, number: int, target: Path) -> bool:
    """Write one line of `source` to the new file `target`. Return False if there is no such line."""
    text = input_line(source, number)
    if text is not None:
        target.write_bytes(text + b"\n")
    return text is not None
