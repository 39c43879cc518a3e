"""A processor with AVX-512, with AMX or with the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.amx import builds
from tests.amx.emulation import Emulation, emulation


@pytest.fixture(scope="session", autouse=True)
def _processor() -> None:
    if lacking := builds.lacking():
        pytest.skip(f"llama.cpp's AMX kernels need {' '.join(lacking)}, which this processor lacks")


@pytest.fixture
def amx() -> Iterator[Emulation]:
    """llama.cpp's kernels as the Makefile compiles them on a machine with AMX."""
    with emulation(builds.WITH_HEADER) as place:
        yield place
