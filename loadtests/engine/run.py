"""The figures of one run of `loadtests.engine`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a mode, counted by the process that did it. Rates are in tokens per second."""

    mode: str
    prompt_tokens: int
    """Of all sequences; those that were computed."""
    arrivals_s: tuple[tuple[float, ...], ...]
    """For each sequence, when each of its tokens was there, in seconds from the start."""
    steps: int
    """Calls of `llama_decode`."""
    cpu_s: float
    """CPU seconds of the process; less than threads times wall seconds if it had to wait."""
    sleeps: int
    """How often a thread of the process gave up its core, to wait for something."""
    preemptions: int
    """How often a thread lost its core to another: many mean a busy machine, and no fair figure."""
    peak_bytes: int
    """The most memory that the process had resident up to now: model, contexts and Python."""

    @property
    def generated_tokens(self) -> int:
        """Of all sequences."""
        return sum(len(times) for times in self.arrivals_s)

    @property
    def wall_s(self) -> float:
        """Seconds from the start to the last token."""
        return max(times[-1] for times in self.arrivals_s)

    @property
    def whole_tps(self) -> float:
        """Generated tokens over the whole run, prompts included."""
        return self.generated_tokens / self.wall_s

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens until every sequence had its first token."""
        return self.prompt_tokens / max(times[0] for times in self.arrivals_s)

    @property
    def decode_tps(self) -> float | None:
        """Generated tokens while every sequence was decoding; None if they hardly ever all were."""
        begin = max(times[0] for times in self.arrivals_s)
        end = min(times[-1] for times in self.arrivals_s)
        rate = 0.0
        for times in self.arrivals_s:
            inside = [t for t in times if begin <= t <= end]
            if len(inside) < 2 or inside[-1] <= inside[0]:
                return None
            rate += (len(inside) - 1) / (inside[-1] - inside[0])
        return rate

    @property
    def ttft_s(self) -> list[float]:
        """Seconds to the first token, of each sequence."""
        return [times[0] for times in self.arrivals_s]

    @property
    def itl_s(self) -> list[float]:
        """Seconds between tokens that follow each other; 0 for two that came together."""
        return [b - a for times in self.arrivals_s for a, b in pairwise(times)]


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


AnyRun = Run | NativeRun
