"""llama.cpp's AMX kernels, as the Makefile compiles them: they run, and compute what the plain ones do."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from cluster.llama_cpp.probe import FORMATS
from tests.amx import builds
from tests.amx.emulation import Emulation, emulation
from tests.amx.products import shapes

pytestmark = pytest.mark.timeout(3600)
"""The first test compiles llama.cpp."""
PROBE = (sys.executable, "-m", "cluster.llama_cpp.probe")
TYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
N_TOKENS = (1, 2, 16, 33, 100)
"""Of prompts. A tile has 16 rows, and a kernel works on two tiles."""


def run(place: Emulation, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=place.variables, stdout=subprocess.PIPE, text=True, timeout=200
    )


def test_the_probe_passes(amx: Emulation) -> None:
    assert run(amx, *PROBE).returncode == 0
    if not builds.has_amx():
        counts = amx.counts()
        assert counts["tdpbssd"] > 10_000
        assert set(counts) == {"ldtilecfg", "tilezero", "tileloadd", "tilestored", "tdpbssd"}


def test_without_the_header_the_probe_dies() -> None:
    if not builds.drops_stores():
        pytest.skip("this compiler does not have the error that tiles.h corrects")
    with emulation(builds.WITHOUT_HEADER) as place:
        assert run(place, *PROBE).returncode in (-signal.SIGILL, -signal.SIGSEGV)


@pytest.mark.parametrize(("kind", "most"), [*((one, 1e-5) for one in TYPES), ("F16", 3e-3)])
def test_products_are_those_of_plain_kernels(amx: Emulation, kind: str, most: float) -> None:
    """Plain kernels round a row to F16 before they multiply by F16, which llama.cpp's other ones do not."""
    done = run(amx, sys.executable, "-m", "tests.amx.products", kind)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert len(found) == len([*shapes()])
    assert max(found.values()) < most
    if not builds.has_amx():
        assert (amx.counts().get("tdpbssd", 0) > 1_000) == (kind != "F16")


@pytest.mark.parametrize("name", FORMATS)
def test_a_models_logits_are_those_of_plain_kernels(amx: Emulation, name: str) -> None:
    """A product's last bit can change how the next one's row is rounded. That makes some hundredths, also
    between kernels without AMX. One token is read without tiles, and two are too few for that."""
    done = run(amx, sys.executable, "-m", "tests.amx.logits", name, *map(str, N_TOKENS))
    assert done.returncode == 0
    one, two, *more = json.loads(done.stdout)
    assert max(one, two) < 1e-5
    assert max(more) < 0.1
    if not builds.has_amx():
        assert amx.counts()["tdpbssd"] > 1_000
