"""The receipt of an answer: what the request waited for and what was done for it. Clients ask for it with a header.

Knows workers' receipts and the JSON object `tidegate` that is made of them; does not know HTTP or token events.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from gateway.http.sse import DONE
from scheduler.request import Receipt

END_OF_FRAME = b"}\n\n"


def receipt_object(
    tier_requested: str,
    tier_served: str,
    total_ms: int,
    sequences: Sequence[tuple[Receipt, int]],
    rule: str | None = None,
) -> dict[str, Any]:
    """Return the object `tidegate` of an answer.

    `sequences` holds the worker's receipt and the number of cached prompt tokens of each sequence, in their order. The
    times at the top are those of the sequence that took longest, but `engine_ms` is that of all. If there are several,
    each also has an entry of its own. `rule` is the routing rule that chose the tier.
    """
    entries = [asdict(receipt) | {"cached_tokens": cached} for receipt, cached in sequences]
    answer: dict[str, Any] = {"tier_requested": tier_requested, "tier_served": tier_served, "total_ms": total_ms}
    if rule is not None:
        answer["rule"] = rule
    if entries:
        answer |= max(entries, key=lambda e: float(e["queue_ms"] + e["prefill_ms"] + e["decode_ms"]))
        parts = [receipt.engine_ms for receipt, _ in sequences if receipt.engine_ms is not None]
        answer["engine_ms"] = round(sum(parts), 3) if parts else None
    if len(entries) > 1:
        answer["sequences"] = entries
    return answer


def with_receipt(frames: bytes, receipt: Mapping[str, Any]) -> bytes:
    """Return the last frames of a stream. Their last object also has the key `tidegate`."""
    end = DONE if frames.endswith(DONE) else b""
    objects = frames.removesuffix(end).removesuffix(END_OF_FRAME)
    return objects + b',"tidegate":' + msgspec.json.encode(receipt) + END_OF_FRAME + end
