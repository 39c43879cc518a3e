"""The figures of one run of `loadtests.engine`, of whatever program."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.cli.measure.benchmark import peak_bytes
from serve_app.cli.measure.process import MeasuredRun


@dataclass(frozen=True, slots=True)
class ModeRun(MeasuredRun):
    """A run of a mode, and how its process used the time."""

    mode: str
    steps: int
    """Calls of `llama_decode`."""
    cpu_s: float
    """CPU seconds of the process; less than threads times wall seconds if it had to wait."""
    sleeps: int
    """How often a thread of the process gave up its core, to wait for something."""
    preemptions: int
    """How often a thread lost its core to another: many mean a busy machine, and no fair figure."""


class Meter:
    """Measures how this process uses time from here on."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._cpu_s = time.process_time()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._start = time.perf_counter()

    def run(self, prompt_tokens: int, arrivals: Sequence[Sequence[float]], steps: int) -> ModeRun:
        """The run that began when this was made; arrivals by `time.perf_counter()`."""
        now = resource.getrusage(resource.RUSAGE_SELF)
        return ModeRun(
            mode=self._mode,
            prompt_tokens=prompt_tokens,
            arrivals_s=tuple(tuple(t - self._start for t in times) for times in arrivals),
            steps=steps,
            cpu_s=time.process_time() - self._cpu_s,
            sleeps=now.ru_nvcsw - self._usage.ru_nvcsw,
            preemptions=now.ru_nivcsw - self._usage.ru_nivcsw,
            peak_bytes=peak_bytes(),
        )


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


AnyRun = ModeRun | NativeRun
