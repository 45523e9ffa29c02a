"""How long the refusal of a wrong API key is delayed, by the address that sent it.

A right key is never delayed, so that nobody is locked out who shares an address with an attacker. Knows addresses and
times; does not know keys.
"""

from collections import OrderedDict

FREE = 10  # wrong keys of one address in a row that are refused at once
PERIOD_S = 1.0  # seconds between the refusals of further ones; also after how long one of the free ones is free again
MAX_DELAY_S = 30.0  # more would only keep connections open
MAX_ADDRESSES = 4096  # the addresses that were quiet for longest are forgotten first


class WrongKeys:
    def __init__(self) -> None:
        self._paid_until_s: OrderedDict[str, float] = OrderedDict()

    def delay_s(self, address: str, now: float) -> float:
        """Count a wrong key, and return how many seconds its refusal has to wait."""
        paid_until_s = max(self._paid_until_s.pop(address, now), now) + PERIOD_S
        self._paid_until_s[address] = min(paid_until_s, now + FREE * PERIOD_S + MAX_DELAY_S)
        if len(self._paid_until_s) > MAX_ADDRESSES:
            self._paid_until_s.popitem(last=False)
        return max(0.0, self._paid_until_s[address] - now - FREE * PERIOD_S)
