"""The receipt of an answer: what the request waited for and what was done for it. Clients ask for it with a header.

Knows workers' receipts and the JSON object `tidegate` that is made of them; does not know HTTP or token events.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from scheduler.request import Receipt

END_OF_FRAME = b"}\n\n"


def receipt_object(
    tier_requested: str,
    tier_served: str,
    total_ms: int,
    workers: Mapping[int, Receipt],
    cached_tokens: Mapping[int, int],
) -> dict[str, Any]:
    """Return the object `tidegate` of an answer.

    `workers` and `cached_tokens` hold the workers' receipts and the cached prompt tokens, by the index of the choice.
    The times at the top are those of the choice that took longest. If there are several choices, each also has an entry
    of its own.
    """
    entries = {index: asdict(receipt) | {"cached_tokens": cached_tokens[index]} for index, receipt in workers.items()}
    answer: dict[str, Any] = {"tier_requested": tier_requested, "tier_served": tier_served, "total_ms": total_ms}
    if entries:
        answer |= max(entries.values(), key=lambda e: float(e["queue_ms"] + e["prefill_ms"] + e["decode_ms"]))
    if len(entries) > 1:
        answer["choices"] = [{"index": index, **entries[index]} for index in sorted(entries)]
    return answer


def with_receipt(frames: bytes, receipt: Mapping[str, Any]) -> bytes:
    """Return frames of a stream whose last object also has the key `tidegate`."""
    return frames.removesuffix(END_OF_FRAME) + b',"tidegate":' + msgspec.json.encode(receipt) + END_OF_FRAME
