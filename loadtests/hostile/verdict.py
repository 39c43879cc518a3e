"""Whether a server held against an attack. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtests.hostile.attack import Attack
from loadtests.hostile.figures import Seen

TTFT_NOISE_S, ITL_NOISE_S = 0.05, 0.01
"""Two stretches without any attack differ by so much: what is below counts as nothing."""
DOUBT = 3.0
"""Other programs on the machine make something take so many times as long as it may, now and then."""
HELD, HURT = "held", "hurt"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one attack."""

    attack: Attack
    seconds: float
    """How long it took."""
    calm: Seen
    """The honest users just before it."""
    during: Seen
    answers: Mapping[str, int]
    """The attacker's answers: requests by status and code."""
    problems: Sequence[str]
    """The problems that the attack itself found."""
    died: Sequence[str]
    """Processes that served others."""
    memory_before_mib: float
    memory_most_mib: float
    recovered_s: float | None
    """How long after it an honest request was answered; None if none was."""
    attempt: int = 1
    """It was made so many times, this one included."""

    @property
    def memory_mib(self) -> float:
        """How much the server's processes grew."""
        return self.memory_most_mib - self.memory_before_mib

    @property
    def reasons(self) -> list[str]:
        """The problems, the worst first; nothing if the server held."""
        return [*self._broken(), *self._slower(), *self._large(), *self.problems]

    @property
    def is_doubtful(self) -> bool:
        """Whether nothing is wrong but honest users' times, by so little that others on the machine may be
        to blame."""
        grave = self._broken() or self._slower(DOUBT) or self._large() or self.problems
        return bool(self._slower()) and not grave

    @property
    def verdict(self) -> str:
        """HELD, or HURT."""
        return HURT if self.reasons else HELD

    def _broken(self) -> list[str]:
        found = [f"{name} died" for name in self.died]
        if self.recovered_s is None:
            found.append("the server does not answer any more")
        if self.calm.failures or not self.calm.answers:
            found.append("honest users were not served in the calm before: this shows nothing")
        if failures := self.during.failures:
            kinds = sorted({failure.partition("\n")[0] for failure in failures})
            found.append(f"{len(failures)} honest requests failed ({'; '.join(kinds[:3])})")
        elif not self.during.answers:
            found.append("no honest request was answered")
        return found

    def _slower(self, times: float = 1.0) -> list[str]:
        """The times that were longer than so many times their limits."""
        bars, calm, during = self.attack.bars, self.calm, self.during
        found = []
        if _above(during.ttft_p95_s, calm.ttft_p95_s, bars.ttft_factor, TTFT_NOISE_S, times):
            found.append(f"first tokens took {_times(during.ttft_p95_s, calm.ttft_p95_s)} as long")
        if _above(during.itl_p99_s, calm.itl_p99_s, bars.itl_factor, ITL_NOISE_S, times):
            found.append(f"gaps were {_times(during.itl_p99_s, calm.itl_p99_s)} as long")
        if _above(during.longest_pause_s, calm.longest_pause_s, 1, bars.pause_s, times):
            found.append(f"/health took {during.longest_pause_s:.2f} s")
        return found

    def _large(self) -> list[str]:
        most = self.attack.bars.memory_mib
        is_large = most is not None and self.memory_mib > most
        return [f"memory grew by {self.memory_mib:.0f} MiB"] if is_large else []


def _above(
    during: float | None,
    calm: float | None,
    factor: float | None,
    margin: float | None,
    times: float,
) -> bool:
    """Whether it is more than `times` what it may be: so many times calm's, or calm's and a margin."""
    if during is None or calm is None or factor is None or margin is None:
        return False
    return during > times * max(factor * calm, calm + margin)


def _times(during: float | None, calm: float | None) -> str:
    return f"{during / calm:.1f} times" if during is not None and calm else "?"
