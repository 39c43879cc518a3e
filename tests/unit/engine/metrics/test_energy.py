"""Energy by the counters of a machine that is made of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.engine.metrics.energy import EnergyMeter

RANGE_J = 100.0


class Machine:
    """A folder with the counters of processor packages, and the clocks of a process."""

    def __init__(self, root: Path, *packages: str) -> None:
        self.root, self.now, self.own_s, self.busy_s = root, 0.0, 0.0, 0.0
        self.zones = [root / f"sys/class/powercap/intel-rapl:{i}" for i in range(len(packages))]
        for zone, name in zip(self.zones, packages, strict=True):
            zone.mkdir(parents=True)
            (zone / "name").write_text(f"{name}\n")
            (zone / "max_energy_range_uj").write_text(f"{int(RANGE_J * 1e6)}\n")
        (root / "proc").mkdir()
        self.joules = 0.0
        self.passes(0, 0, 0, 0)

    def passes(self, seconds: float, joules: float, busy_s: float, own_s: float) -> None:
        """So much time, energy of each package and CPU time pass."""
        self.now += seconds
        self.joules += joules
        self.busy_s += busy_s
        self.own_s += own_s
        for zone in self.zones:
            (zone / "energy_uj").write_text(f"{int(self.joules % RANGE_J * 1e6)}\n")
        ticks = f"cpu  {int(100 * self.busy_s)} 0 0 {int(1e6 * self.now)} 7 0 0 0 0 0\ncpu0 1\n"
        (self.root / "proc/stat").write_text(ticks)

    def meter(self) -> EnergyMeter:
        return EnergyMeter(self.root, lambda: self.now, lambda: self.own_s)


def test_a_request_has_its_part_of_the_packages_energy(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "package-0", "package-1", "psys")
    meter = machine.meter()
    assert meter.joules(1.0) is None, "no time has passed"
    machine.passes(2.0, 60.0, 4.0, 3.0)  # 60 W from both packages, three quarters of them ours
    assert meter.joules(1.5) == pytest.approx(1.5 * 45)
    assert meter.joules(1.5) == pytest.approx(1.5 * 45), "too soon for another look"
    machine.passes(1.0, 70.0, 1.0, 1.0)  # the counters begin again
    assert meter.joules(0.5) == pytest.approx(0.5 * 140)


def test_what_is_not_shown_is_not_measured(tmp_path: Path) -> None:
    assert EnergyMeter(tmp_path / "none").joules(1.0) is None
    machine = Machine(tmp_path, "package-0")
    meter = machine.meter()
    for zone in machine.zones:
        (zone / "energy_uj").unlink()  # as to users who may not read it
    machine.now += 5
    assert meter.joules(1.0) is None
    assert machine.meter().joules(1.0) is None
