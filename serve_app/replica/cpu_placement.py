"""Finds a replica's place on its node, and its threads."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from serve_app.config.resolved import ResolvedModel
from serve_app.errors import ConfigError
from serve_app.placement import leases, machine, plan
from serve_app.placement.machine import Machine, oversubscription, own_cpus
from serve_app.placement.pinning import CorePinning, pin, unpinned

logger = logging.getLogger("corral.replica")


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """Where a replica computes."""

    pinning: CorePinning
    threads: int
    reason: str
    """Why so many, in one line."""
    computing_cpus: tuple[int, ...] | None
    """The CPUs that the computing threads keep to; None: all that the process may use."""


def place_on_cpus(
    model: ResolvedModel, reserved: float, here: Machine | None = None
) -> CpuPlacement:
    """A replica's place on its node, by default this one, and its threads, with so many reserved CPUs.
    Before anything starts threads: they inherit the place. Raises ConfigError for more threads than CPUs,
    unless the configuration allows them."""
    here = here or machine.read()
    n_cores = plan.n_cores(here, reserved)
    most = max(model.threads or n_cores, model.options.threads_batch or 0)
    complaint = oversubscription(
        most,
        own_cpus(here, reserved),
        "all that this replica may use (affinity mask, CPU quota, num_cpus)",
    )
    if complaint and not model.allow_oversubscription:
        raise ConfigError(f"models ({model.id}): {complaint}")
    if complaint:
        logger.warning("Model %s: %s", model.id, complaint)
        pinning = unpinned("it has more threads than cores")
    else:
        pinning = _pinning(model, reserved, here, spread=most > n_cores)
    if pinning.one_of_each is not None:
        n_cores = len(pinning.one_of_each)
    if model.threads is not None:
        return CpuPlacement(pinning, model.threads, "as configured", _computing(pinning, most))
    reason = _reason(here, pinning, reserved)
    return CpuPlacement(pinning, n_cores, reason, _computing(pinning, max(most, n_cores)))


def _pinning(model: ResolvedModel, reserved: float, here: Machine, *, spread: bool) -> CorePinning:
    numa = model.options.numa
    if numa is not None and len(here.topology.nodes) == 1:
        logger.info("Model %s: engine.numa has no effect: there is one NUMA node.", model.id)
    elif numa in ("distribute", "isolate"):
        return unpinned(f"engine.numa: {numa} places its threads")
    if not model.pin_cores:
        return unpinned("engine.pin_cores is false")
    return pin(reserved, leases.default_folder(), here, spread=spread)


def _computing(pinning: CorePinning, threads: int) -> tuple[int, ...] | None:
    """One hyper-thread of each leased core, if that is enough: the kernel cannot put two threads on
    one then, and the others are left to the rest of the process."""
    alone = pinning.one_of_each
    return alone if alone != pinning.cores and alone is not None and threads <= len(alone) else None


def _reason(here: Machine, pinning: CorePinning, reserved: float) -> str:
    if here.quota is not None:
        n_all = len(here.topology.cpus)
        return f"its part of a CPU quota of {here.quota:g} cores, on {n_all} that others use too"
    n_cpus = own_cpus(here, reserved) if pinning.cores is None else len(pinning.cores)
    cpus = "CPUs" if n_cpus > 1 else "CPU"
    return f"one for each physical core of its {n_cpus} {cpus}"
