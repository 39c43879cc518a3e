"""Who is next for a slot: fair among clients. Pure: no model, no threads, no clock.

Start-time fair queueing: every client has a virtual time that grows by what its requests cost, and the
request whose client has the least goes first. Source: Goyal, Vin and Cheng, "Start-time Fair Queueing",
SIGCOMM 1996.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from serve_app.engine.sequence import Sequence

Cost = Callable[[int, int], float]
"""What so many prompt tokens and so many generated ones cost, in any unit."""

# Generated tokens that a request is taken to cost before it has ended.
_EXPECTED_TOKENS = 128


class FairQueue:
    """The sequences that wait for a slot. A client is what requests name; all that name none are one.

    A lower `priority` goes first, whatever was served. Among equals, a client with one short request
    does not wait for all of another's: each goes when its client's virtual time has come. A client that
    was away starts where the others are, so nobody saves up.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._waiting: list[Sequence] = []
        self._virtual: dict[str, float] = {}
        self._live: dict[str, int] = {}
        """Requests of each client that wait or run: who has none is forgotten."""
        self._now = 0.0
        """Virtual time of the request that was admitted last."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def unordered(self) -> Iterable[Sequence]:
        """All that wait."""
        return self._waiting

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of admission: whoever lost a slot, here or elsewhere, goes before everybody new."""
        start: dict[str, float] = {}
        ranked: list[tuple[bool, int, float, int, Sequence]] = []
        for arrival, sequence in enumerate(self._waiting):
            client = sequence.request.client
            at = start.get(client, self._virtual[client])
            start[client] = at + self._expected(sequence)
            fresh = sequence.trace.admitted is None and not sequence.request.n_failovers
            ranked.append((fresh, sequence.request.priority, at, arrival, sequence))
        return iter([entry[-1] for entry in sorted(ranked, key=lambda entry: entry[:4])])

    def extend(self, sequences: Iterable[Sequence]) -> None:
        """Requests came."""
        for sequence in sequences:
            client = sequence.request.client
            if client not in self._live:
                self._virtual[client] = self._now
            self._live[client] = self._live.get(client, 0) + 1
            self._waiting.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It lost its slot, and waits for another one; its client has been charged."""
        self._waiting.append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """It got a slot: its client is charged what it will probably cost, the first time."""
        self._waiting.remove(sequence)
        if sequence.trace.admitted is not None:
            return
        client = sequence.request.client
        self._now = max(self._now, self._virtual[client])
        self._virtual[client] += self._expected(sequence)

    def end(self, sequence: Sequence) -> None:
        """It ended, with a slot or without: what it really cost counts."""
        client = sequence.request.client
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.trace.admitted is not None:
            n_generated = sequence.n_generated - len(sequence.request.generated)
            real = self._cost(sequence.n_computed, n_generated)
            self._virtual[client] += real - self._expected(sequence)
        self._live[client] -= 1
        if not self._live[client]:
            del self._live[client], self._virtual[client]

    def _expected(self, sequence: Sequence) -> float:
        most = sequence.request.sampling.max_tokens
        most = _EXPECTED_TOKENS if most is None else most
        return self._cost(sequence.n_prompt, min(most, _EXPECTED_TOKENS))
