"""Times batches in rounds, and doubts what no kernel explains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

# Batches shorter than this are measured in two rounds: the shorter, the noisier.
_SHORT_S = 0.35
# Doubted are batches that take so many times longer than a larger one, or, by row, than a smaller one; and
# so many rounds more are made of them.
_SLOWER, _SLOWER_BY_ROW, _DOUBTED_ROUNDS = 1.1, 1.2, 2


def doubtful(times: Mapping[int, float]) -> list[int]:
    """The numbers of rows that may have been measured while something else ran.

    More rows take no less time, and not much more by row than fewer. Kernels with tiles break both rules,
    so what is still doubtful when it is measured again is to be believed.
    """
    sizes = sorted(times)
    least_by_row = {n: min(times[m] / m for m in sizes if m <= n) for n in sizes}
    least = {n: min(times[m] for m in sizes if m >= n) for n in sizes}
    return [
        n
        for n in sizes
        if times[n] > _SLOWER * least[n] or times[n] / n > _SLOWER_BY_ROW * least_by_row[n]
    ]


class Trials:
    """Times batches, as long as there is time. The least of a size's times counts: whatever else runs
    makes a batch longer. A size is tried again only after the others, when a hiccup is likely to be
    over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.left_s = 0.0
        """Seconds that may still be spent."""
        self._differences: list[float] = []

    def timed(self, run: Callable[[], None]) -> float:
        """Seconds of that, which are spent."""
        began = self._clock()
        run()
        seconds = self._clock() - began
        self.left_s -= seconds
        return seconds

    @property
    def noise(self) -> float:
        """By what part a batch took longer one time than another, as the median of all that were tried
        again; 0 if none was."""
        return statistics.median(self._differences or [0.0])

    def time_for(self, seconds: float) -> bool:
        """Whether so many are left."""
        return seconds < self.left_s

    def measure(
        self, times: dict[int, float], sizes: Sequence[int], trial: Callable[[int], float]
    ) -> Iterator[None]:
        """Add what batches of these sizes take; the first of all is measured in any case. One is run
        when the next is asked for, and each size takes its turn even if there is no time for it: what
        is compared stays in step."""
        new = [n for n in sizes if n not in times]
        for n in new:
            if not times or self.time_for(_expected(times, n)):
                times[n] = trial(n)
            yield
        for n in new:
            if times.get(n, _SHORT_S) < _SHORT_S:
                self._again(times, n, trial)
            yield
        for _ in range(_DOUBTED_ROUNDS):
            for n in sorted(set(new) & set(doubtful(times))):
                self._again(times, n, trial)
                yield

    def once_more(
        self, times: dict[int, float], sizes: Sequence[int], trial: Callable[[int], float]
    ) -> Iterator[None]:
        """One more round of those of these sizes that were measured, as far as there is time."""
        for n in sizes:
            if n in times:
                self._again(times, n, trial)
            yield

    def _again(self, times: dict[int, float], n: int, trial: Callable[[int], float]) -> None:
        if self.time_for(times[n]):
            least, most = sorted((times[n], trial(n)))
            times[n] = least
            self._differences.append(most / least - 1 if least > 0 else 0.0)


def _expected(times: Mapping[int, float], n: int) -> float:
    smaller = {size: seconds for size, seconds in times.items() if size <= n}
    return n * min(seconds / size for size, seconds in (smaller or times).items())
