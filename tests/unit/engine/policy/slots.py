"""Slots without a cache, for tests of the policy: what waits, what runs, and what it had."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from serve_app.base.sampling import SamplingParams
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine import EngineOptions
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.policy.policy import SlotPolicy


def sequence(
    name: str,
    expected_s: float = 10,
    *,
    client: str | None = None,
    priority: int = 0,
    background: bool = False,
    n_tokens: int = 1,
) -> Sequence:
    """A request of its first letter's client."""
    request = GenerationRequest(
        name,
        (1,),
        SamplingParams(max_tokens=n_tokens),
        name[0] if client is None else client,
        priority,
        background=background,
    )
    made = Sequence(request, lambda delta: None)
    made.expected_s = expected_s
    return made


def free(one: Sequence) -> float | None:
    """Nothing is to be stored."""
    return 0.0


@dataclass
class Slots:
    """So many slots, each with room for everything."""

    n_slots: int = 99
    cost_s: Callable[[Sequence], float | None] = free
    now: float = 0.0
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = SlotPolicy(EngineOptions(self.n_slots, 64, 1))

    @property
    def n_idle(self) -> int:
        return self.n_slots - len(self.running)

    def fits(self, sequence: Sequence) -> bool:
        return True

    def has_room(self, sequence: Sequence, held: Sequence | None = None) -> bool:
        return True

    def arrive(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.policy.enter(one.request)
        self.waiting += sequences

    @property
    def names(self) -> str:
        """Those that may have a slot, in order."""
        return " ".join(one.id for one in self.policy.next(self.waiting, self.running, self))

    def occupy(self, one: Sequence) -> Sequence:
        """Give a sequence a slot."""
        self.waiting.remove(one)
        self.running.append(one)
        one.trace.admitted = one.trace.admitted or self.now + 1e-9
        return one

    def admit(self) -> Sequence:
        """Give the first one a slot."""
        return self.occupy(next(self.policy.next(self.waiting, self.running, self)))

    def admit_all(self) -> str:
        """Give one after the other a slot, each as if it came alone: their names."""
        names = []
        while self.waiting:
            names.append(self.admit().id)
        return " ".join(names)

    def give_back(self) -> list[Sequence]:
        """Those that the policy preempts, for others."""
        given = self.policy.gives_back(self.waiting, self.running, self, self.cost_s, self.now)
        for one in given:
            self.preempt(one, for_another=True)
        return given

    def preempt(self, one: Sequence, *, for_another: bool) -> None:
        self.running.remove(one)
        self.waiting.insert(0, one)
        one.lost_slot = not for_another

    def end(self, one: Sequence) -> None:
        had_slot = one.trace.admitted is not None
        (self.running if one in self.running else self.waiting).remove(one)
        self.policy.leave(one.request, self.now if had_slot else None)


def with_waiting(*sequences: Sequence) -> Slots:
    made = Slots()
    made.arrive(*sequences)
    return made


def rank(live: Iterable[Sequence], n_slots: int, left: Iterable[str] = ()) -> SlotPolicy:
    """The policy that has decided who is behind, when those who `left` had a slot just now."""
    slots = Slots(n_slots, now=1.0)
    for client in left:
        one = sequence(client, client=client)
        slots.arrive(one)
        slots.end(slots.admit())
    slots.now += 0.1
    slots.running = list(live)
    slots.give_back()
    return slots.policy
