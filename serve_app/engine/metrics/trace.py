"""The time of requests by stages: the trace of each, and histograms and records of the recent ones."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable

from serve_app.base.values.answers import GAP_BOUNDARIES_S, Timings
from serve_app.base.values.replicas import RequestRecord
from serve_app.engine.metrics import energy


class Trace:
    """The times of a sequence. Decoder thread only, but for the start."""

    def __init__(self) -> None:
        self.submitted = time.monotonic()
        self.admitted: float | None = None
        self._first_token: float | None = None
        self._last_token = self.submitted
        self.gap_s = 0.0
        """Seconds from the token before to the last one, or from the arrival to the first."""
        self._n_gaps = [0] * (len(GAP_BOUNDARIES_S) + 1)
        self._gaps_s = [0.0] * len(self._n_gaps)
        self._preempted: float | None = None
        self._preempted_s = 0.0
        self._n_preemptions = 0
        self._apart_s = 0.0
        """The part of the time since its first token that it spent in batches or without a slot."""
        self._n_batches = 0
        self._n_sequences = 0

    def admit(self) -> None:
        """Note that it got a slot, for the first time or again."""
        energy.meter().look()
        now = time.monotonic()
        self.admitted = self.admitted or now
        if self._preempted is not None:
            self._without_slot(now - self._preempted)
            self._preempted = None

    def preempt(self) -> None:
        """Note that it lost its slot."""
        self._preempted = time.monotonic()
        self._n_preemptions += 1

    def on_batch(self, seconds: float, n_sequences: int) -> None:
        """A batch took so long, and computed so many sequences, this one among them."""
        self._n_batches += 1
        self._n_sequences += n_sequences
        if self._first_token is not None:
            self._apart_s += seconds

    def tokens(self, n: int) -> None:
        """Note so many more tokens. They leave together, so there is one gap before them all."""
        now = time.monotonic()
        self._last_token, self.gap_s = now, now - self._last_token
        if self._first_token is None:
            self._first_token = now
        else:
            bucket = bisect_left(GAP_BOUNDARIES_S, self.gap_s)
            self._n_gaps[bucket] += 1
            self._gaps_s[bucket] += self.gap_s
        self._n_gaps[0] += n - 1

    @property
    def decoding_s(self) -> float:
        """Seconds since the first token; 0 before it."""
        return 0.0 if self._first_token is None else time.monotonic() - self._first_token

    @property
    def prefill_s(self) -> float:
        """Seconds since the sequence got its first slot; 0 before that."""
        return 0.0 if self.admitted is None else time.monotonic() - self.admitted

    def end(self, compute_s: float = 0.0) -> Timings:
        """The times up to now, and the seconds that were charged to the request."""
        now = time.monotonic()
        if self._preempted is not None:
            self._without_slot(now - self._preempted)
            self._preempted = None
        admitted = self.admitted or now
        first_token = self._first_token or now
        decode_s = now - first_token
        return Timings(
            queue_s=admitted - self.submitted,
            prefill_s=first_token - admitted,
            decode_s=decode_s,
            stalled_s=max(0.0, decode_s - self._apart_s),
            preempted_s=self._preempted_s,
            n_preemptions=self._n_preemptions,
            mean_batch=self._n_sequences / self._n_batches if self._n_batches else 0.0,
            gaps=tuple(zip(self._n_gaps, self._gaps_s, strict=True)),
            compute_s=compute_s,
            joules=energy.meter().joules(compute_s),
        )

    def _without_slot(self, seconds: float) -> None:
        self._preempted_s += seconds
        if self._first_token is not None:
            self._apart_s += seconds


_SLICE_S = 15.0
_N_SLICES = 20
# From a millisecond to ten minutes, each a tenth more than the one before.
BOUNDS = tuple(float(f"{0.001 * 1.1**i:.3g}") for i in range(141))
KINDS = ("ttft_s", "itl_s")


class Latencies:
    """Histograms of the last five minutes. The decoder thread adds, any thread may look.

    Counts and not times: what adding and looking cost does not grow with the load, and those of several
    engines can be added up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._slices: deque[tuple[float, Counter[tuple[str, float]]]] = deque(maxlen=_N_SLICES)

    def add(self, kind: str, seconds: float) -> None:
        """Count a time of `kind`, which is one of `KINDS`."""
        now = self._clock() // _SLICE_S
        if not self._slices or self._slices[-1][0] != now:
            self._slices.append((now, Counter()))
        bound = BOUNDS[min(bisect_left(BOUNDS, seconds), len(BOUNDS) - 1)]
        self._slices[-1][1][kind, bound] += 1

    def recent(self) -> dict[str, dict[float, int]]:
        """The counts of each kind by bound. So many took up to that many seconds, and more than the bound
        before it (the last bound: or longer). Bounds without any are left out."""
        oldest = self._clock() // _SLICE_S - _N_SLICES
        recent: dict[str, Counter[float]] = {kind: Counter() for kind in KINDS}
        for at, counts in list(self._slices):
            if at > oldest:
                for (kind, bound), n in counts.copy().items():  # somebody may add meanwhile
                    recent[kind][bound] += n
        return {kind: dict(sorted(counts.items())) for kind, counts in recent.items()}


_N_KEPT = 1024


class RequestLog:
    """The last records. The decoder thread adds, any thread may look."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=_N_KEPT)

    def add(self, record: RequestRecord) -> None:
        """Keep it, and forget the oldest."""
        self._records.append(record)

    def find(self, request: str) -> list[RequestRecord]:
        """The records of that request, oldest first."""
        copied = list(self._records)  # in one go: nobody adds meanwhile
        return [record for record in copied if record.belongs_to(request)]
