"""The budget of tokens that may be computed again because streams were hung up: a token bucket.

The tokens that the server computes refill it; each hang-up takes what its continuation will compute again.
"""

RECOMPUTE_SHARE = 0.05  # share of all computed tokens that may be computed a second time
MAX_TOKENS = 8192.0  # size of the bucket, which bounds the hang-ups at one time


class RecomputeBudget:
    def __init__(self) -> None:
        self.num_tokens = 0.0  # tokens that may be recomputed at present
        self.num_computed = 0  # sum: tokens that the server has computed
        self.num_recomputed = 0  # sum: tokens of streams that were hung up

    def refill(self, num_computed: int) -> None:
        self.num_computed += num_computed
        self.num_tokens = min(MAX_TOKENS, self.num_tokens + RECOMPUTE_SHARE * num_computed)

    def spend(self, num_tokens: int) -> None:
        self.num_tokens -= num_tokens
        self.num_recomputed += num_tokens
