"""The figures of one run of `loadtests.engine`, of whatever program."""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.cli.measure.process import MeasuredRun


@dataclass(frozen=True, slots=True)
class NativeRun:
    """One run of `llama-batched-bench`, as it tells it itself: only totals, so no latency of a single
    token. It samples nothing. Rates are in tokens per second."""

    mode: str
    prompt_tokens: int
    """Of all sequences."""
    generated_tokens: int
    """Of all sequences, the one that each prompt's last row would have given included."""
    decoded_tokens: int
    """Those after the prompts."""
    prefill_s: float
    decode_s: float
    peak_bytes: int
    """The most memory that the process had resident, looked at many times a second."""

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last token."""
        return self.prefill_s + self.decode_s

    @property
    def whole_tps(self) -> float:
        """Generated tokens over the whole run, prompts included."""
        return self.generated_tokens / self.wall_s

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens until every sequence had its first token."""
        return self.prompt_tokens / self.prefill_s

    @property
    def decode_tps(self) -> float | None:
        """Generated tokens while every sequence was decoding."""
        return self.decoded_tokens / self.decode_s

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first tokens: all at once."""
        return [self.prefill_s]

    @property
    def itl_s(self) -> list[float]:
        """Unknown."""
        return []


AnyRun = MeasuredRun | NativeRun
