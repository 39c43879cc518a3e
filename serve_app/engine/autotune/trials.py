"""Times batches in rounds, and doubts what no kernel explains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

# Batches shorter than this are measured in two rounds: the shorter, the noisier.
_SHORT_S = 0.35
# Doubted are batches that take so many times longer than a larger one, or, by row, than a smaller one; and
# so many rounds more are made of them.
_SLOWER, _SLOWER_BY_ROW, _DOUBTED_ROUNDS = 1.1, 1.2, 2


def doubtful(found: Mapping[int, float]) -> list[int]:
    """The numbers of rows that may have been measured while something else ran.

    More rows take no less time, and not much more by row than fewer. Kernels with tiles break both rules,
    so what is still doubtful when it is measured again is to be believed.
    """
    sizes = sorted(found)
    least_by_row = {n: min(found[m] / m for m in sizes if m <= n) for n in sizes}
    least = {n: min(found[m] for m in sizes if m >= n) for n in sizes}
    return [
        n
        for n in sizes
        if found[n] > _SLOWER * least[n] or found[n] / n > _SLOWER_BY_ROW * least_by_row[n]
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
        self, found: dict[int, float], sizes: Sequence[int], trial: Callable[[int], float]
    ) -> Iterator[None]:
        """Add what batches of these sizes take; the first of all is measured in any case. One is run
        when the next is asked for, and each size takes its turn even if there is no time for it: what
        is compared stays in step."""
        new = [n for n in sizes if n not in found]
        for n in new:
            if not found or self.time_for(_expected(found, n)):
                found[n] = trial(n)
            yield
        for n in new:
            if found.get(n, _SHORT_S) < _SHORT_S:
                self._again(found, n, trial)
            yield
        for _ in range(_DOUBTED_ROUNDS):
            for n in sorted(set(new) & set(doubtful(found))):
                self._again(found, n, trial)
                yield

    def once_more(
        self, found: dict[int, float], sizes: Sequence[int], trial: Callable[[int], float]
    ) -> Iterator[None]:
        """One more round of those of these sizes that were measured, as far as there is time."""
        for n in sizes:
            if n in found:
                self._again(found, n, trial)
            yield

    def _again(self, found: dict[int, float], n: int, trial: Callable[[int], float]) -> None:
        if self.time_for(found[n]):
            least, most = sorted((found[n], trial(n)))
            found[n] = least
            self._differences.append(most / least - 1 if least > 0 else 0.0)


def _expected(found: Mapping[int, float], n: int) -> float:
    smaller = {size: seconds for size, seconds in found.items() if size <= n}
    return n * min(seconds / size for size, seconds in (smaller or found).items())
