"""The time that picking a token takes, by kind of parameters. Pure: no model, no clock.

The cost model knows what the forward pass takes. Picking from its logits comes on top, one sequence after
the other: from some hundredths of a millisecond to more than ten, as the samplers are that a request uses.
"""

from __future__ import annotations

from serve_app.base.sampling import SamplingParams

# Weight of the newest tokens in what is known, and the most that counts of what took longer than expected:
# it may be a hiccup.
_NEWEST, _MOST_TIMES = 0.2, 3.0


class SamplingCost:
    """The measured time of one kind of parameters. The decoder thread writes, any thread reads."""

    def __init__(self) -> None:
        self.token_s = 0.0

    def observe(self, n_tokens: int, seconds: float) -> None:
        """Learn that picking `n_tokens` tokens took `seconds`."""
        if not n_tokens:
            return
        found_s = seconds / n_tokens
        if self.token_s:
            found_s = min(found_s, _MOST_TIMES * self.token_s)
        self.token_s += (_NEWEST if self.token_s else 1.0) * (found_s - self.token_s)


def sampling_kind(params: SamplingParams) -> tuple[object, ...]:
    """The samplers that are used, and how many candidates go through them. There are some thousands."""
    return (
        params.temperature <= 0,
        params.top_n_sigma > 0,
        max(0, params.top_k).bit_length(),
        params.typical_p < 1,
        params.top_p < 1,
        params.min_p > 0,
        params.penalises,
        params.logprobs is not None,
        params.grammar is not None,
    )
