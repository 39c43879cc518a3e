"""How replicas share a machine that the configuration does not divide. Pure: no files, no clock.

Decoding is bound by memory bandwidth, which each NUMA node has for itself. Threads that wait for each other
across sockets, or share a physical core, are slower than fewer. So a replica gets one node's
physical cores, with all of their hyper-threads, as Ray counts these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.run.placement.machine import Machine, own_cpus

# Replicas may leave this part of the machine's CPUs unused, if they are fewer by that.
_LEFT_OVER = 1 / 4


@dataclass(frozen=True, slots=True)
class Share:
    """A model's part of a machine."""

    n_replicas: int
    num_cpus: float
    """CPUs of each replica, hyper-threads counted; a fraction if there are fewer than models."""
    n_cores: int
    """Physical cores of each: its threads."""
    reason: str
    place_cpus: int = 0
    """The CPUs that it has in turns with other models; 0: none, as its own are `num_cpus`."""


def shares(machine: Machine, n_models: int, *, divided: bool = False) -> list[Share]:
    """A share of the machine for each model, all of which fit: whole NUMA nodes if there are enough. If
    not, models have the cores of a node in turns, or a part of them each, if the machine is `divided`."""
    if machine.quota is not None:
        return _of_quota(machine, machine.quota, n_models, divided=divided)
    sizes = _node_sizes(machine)
    size = _common_size(sizes)
    n_places = sum(cpus // size for cpus in sizes)
    reason = "there is one NUMA node"
    if len(sizes) > 1:
        reason = f"each of {len(sizes)} NUMA nodes has {size} CPUs"
        if set(sizes) != {size}:
            reason = f"NUMA nodes have {', '.join(map(str, sizes))} CPUs, and each replica {size}"
    return _dealt(machine, n_models, n_places, size, reason, divided=divided)


def whole_share(machine: Machine, n_models: int) -> Share:
    """A share of the machine for a model that is to have one replica, over NUMA nodes."""
    return _dealt(machine, n_models, 1, machine.n_cpus, "the configuration sizes it", divided=True)[
        0
    ]


def merge(share: Share, n_replicas: int) -> Share:
    """Fewer replicas, at least 1, that take the places of all."""
    n_places = share.n_replicas // n_replicas
    of_what = f"{n_replicas} replica{'s' * (n_replicas > 1)} instead of {share.n_replicas}"
    return Share(
        n_replicas,
        share.num_cpus * n_places,
        share.n_cores * n_places,
        f"{of_what}, because memory has no room for more",
    )


def n_cores(machine: Machine, reserved: float) -> int:
    """Physical cores that so many reserved CPUs are; 0 reserves none, and means all."""
    cpus = own_cpus(machine, reserved)
    return max(1, min(cpus, cpus * len(machine.topology.cores) // machine.n_cpus))


def cpus_for(machine: Machine, threads: int) -> int:
    """CPUs to be reserved for so many threads on physical cores of their own, as far as there are any."""
    if machine.quota is not None:
        return min(threads, machine.n_cpus)
    n_of_each = len(machine.topology.cpus) / len(machine.topology.cores)
    return min(math.ceil(threads * n_of_each), machine.n_cpus)


def n_together(machine: Machine, num_cpus: float, most: int) -> int:
    """How many of `most` replicas may run on the machine at once, if each has so many CPUs reserved."""
    return most if num_cpus <= 0 else max(1, min(most, math.floor(machine.n_cpus / num_cpus)))


def _of_quota(machine: Machine, quota: float, n_models: int, *, divided: bool) -> list[Share]:
    """A quota is time on cores that others use, too: it is divided where it is more than a node has."""
    of_nodes = Counter(core.node for core in machine.topology.cores)
    n_places = math.ceil(machine.n_cores / max(of_nodes.values()))
    reason = f"a quota allows {quota:g} of {len(machine.topology.cpus)} CPUs"
    return _dealt(machine, n_models, n_places, machine.n_cpus // n_places, reason, divided=divided)


def _dealt(
    machine: Machine, n_models: int, n_places: int, size: int, reason: str, *, divided: bool
) -> list[Share]:
    """Places of so many CPUs dealt to models; if there are too few, models share one. Ray reserves an equal
    part of it for each then."""
    n_sharing = math.ceil(n_models / n_places)
    num_cpus = _whole_or_fraction(machine, size / n_sharing)
    in_turns = n_sharing > 1 and not divided
    if n_models > 1:
        reason += f", which {n_models} models share" + " in turns" * in_turns
    return [
        Share(
            n_replicas := max(1, n_places // n_models + (i < n_places % n_models)),
            num_cpus,
            n_cores(machine, size if in_turns else num_cpus),
            f"{n_replicas} replica{'s' * (n_replicas > 1)}, because {reason}",
            size if in_turns else 0,
        )
        for i in range(n_models)
    ]


def _whole_or_fraction(machine: Machine, cpus: float) -> float:
    """Whole physical cores where there are any, then whole CPUs; a fraction is cut to what Ray can add."""
    n_of_each, odd = divmod(len(machine.topology.cpus), len(machine.topology.cores))
    if machine.quota is None and not odd and cpus >= n_of_each:
        return math.floor(cpus / n_of_each) * n_of_each
    return math.floor(cpus) if cpus >= 1 else math.floor(100 * cpus) / 100


def _node_sizes(machine: Machine) -> list[int]:
    of_nodes: Counter[int | None] = Counter()
    for core in machine.topology.cores:
        of_nodes[core.node] += len(core.cpus)
    return sorted(of_nodes.values(), reverse=True)


def _common_size(sizes: Sequence[int]) -> int:
    """CPUs of one replica, all replicas being alike: the largest node's that leaves little of the others
    unused, or else what leaves least."""
    used = {size: size * sum(cpus // size for cpus in sizes) for size in sizes}
    enough = (1 - _LEFT_OVER) * sum(sizes)
    return next((size for size in sizes if used[size] >= enough), max(used, key=lambda s: used[s]))
