"""The instructions of AMX, one by one: the emulator's, or where the processor has AMX, its own."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from loadtests.compare.llama_server import TILES
from tests.amx import builds
from tests.amx.emulation import INSTRUCTIONS, emulation

SOURCE = Path(__file__).parent / "program.cpp"
ROWS, COLUMNS, DEPTH = 5, 7, 9
"""Of the program's product, in units of 4 bytes."""
PITCH = 80
"""Of a row in memory, in bytes."""

Bytes = NDArray[np.uint8]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("amx") / "program"
    options = ("-O2", "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-pthread", "-include", TILES)
    subprocess.run(["g++", *options, SOURCE, "-o", target], check=True, timeout=60)
    return target


def run(program: Path, name: str, given: bytes = b"") -> tuple[int, bytes, dict[str, int]]:
    """The status, the output and what was emulated."""
    with emulation() as place:
        done = subprocess.run(
            [program, name], input=given, stdout=subprocess.PIPE, env=place.variables, timeout=60
        )
        return done.returncode, done.stdout, place.counts()


def memory(rng: np.random.Generator, rows: int) -> Bytes:
    return rng.integers(0, 256, (rows, PITCH), np.uint8)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("name", "left_type", "right_type"),
    [
        ("tdpbssd", np.int8, np.int8),
        ("tdpbsud", np.int8, np.uint8),
        ("tdpbusd", np.uint8, np.int8),
        ("tdpbuud", np.uint8, np.uint8),
    ],
)
def test_bytes_are_multiplied_and_added_modulo_32_bits(
    program: Path, name: str, left_type: type, right_type: type, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before, left, right = (memory(rng, rows) for rows in (ROWS, ROWS, DEPTH))
    status, out, counts = run(
        program, name, b"".join(one.tobytes() for one in (before, left, right))
    )
    factors = left[:, : 4 * DEPTH].view(left_type).astype(np.int64)
    quads = right[:, : 4 * COLUMNS].reshape(DEPTH, COLUMNS, 4).transpose(0, 2, 1)
    products = factors @ quads.reshape(4 * DEPTH, COLUMNS).view(right_type).astype(np.int64)
    expected = before.copy()
    numbers = expected[:, : 4 * COLUMNS].view(np.uint32)
    numbers[:] = (numbers + products).astype(np.uint32)
    assert (status, out) == (0, expected.tobytes())
    if not builds.has_amx():
        assert counts == {
            "ldtilecfg": 1,
            "tileloadd": 2,
            "tileloaddt1": 1,
            name: 1,
            "tilestored": 1,
        }


def test_products_of_bfloat16_are_added(program: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = ((ROWS, PITCH // 4), (ROWS, PITCH // 2), (DEPTH, PITCH // 2))
    before, left, right = (rng.integers(-8, 9, shape).astype(np.float32) for shape in shapes)
    upper = [(one.view(np.uint32) >> 16).astype(np.uint16) for one in (left, right)]
    given = before.tobytes() + b"".join(one.tobytes() for one in upper)
    status, out, _ = run(program, "tdpbf16ps", given)
    pairs = right[:, : 2 * COLUMNS].reshape(DEPTH, COLUMNS, 2).transpose(0, 2, 1)
    before[:, :COLUMNS] += left[:, : 2 * DEPTH] @ pairs.reshape(2 * DEPTH, COLUMNS)
    assert status == 0
    assert out == before.tobytes()


def test_the_configuration_is_stored_and_released(program: Path) -> None:
    status, out, _ = run(program, "state")
    row_bytes, rows = (0, 28, 36, 28), (0, 5, 5, 9)
    config = np.zeros(64, np.uint8)
    config[0], config[16:24:2], config[48:52] = 1, row_bytes, rows
    assert (status, out) == (0, config.tobytes() + bytes(5 * 28) + bytes(64))


def test_operands_are_found_in_all_ways_of_addressing(program: Path) -> None:
    status, out, _ = run(program, "addresses")
    rows = (b"the first row..", b"and the second.")
    config = np.zeros(64, np.uint8)
    config[0], config[18], config[49] = 1, 4, 2
    assert status == 0
    assert out == b"".join(row.ljust(32, b"\0") for row in rows) + config.tobytes()


@pytest.mark.parametrize(
    "name", ["too many rows", "no columns", "reserved", "ninth tile", "unknown palette"]
)
def test_a_wrong_configuration_is_a_protection_fault(program: Path, name: str) -> None:
    status, _, counts = run(program, name)
    assert (status, counts) == (-signal.SIGSEGV, {})


@pytest.mark.parametrize(
    "name",
    ["not permitted", "not configured", "released", "unused tile", "shapes", "another instruction"],
)
def test_other_faults_are_invalid_instructions(program: Path, name: str) -> None:
    status, _, _ = run(program, name)
    assert status == -signal.SIGILL


def test_a_programs_own_handler_gets_the_rest(program: Path) -> None:
    status, out, counts = run(program, "own handler")
    assert (status, out) == (0, b"own handler")
    assert counts in ({}, {"ldtilecfg": 1})
    assert set(counts) <= set(INSTRUCTIONS)
