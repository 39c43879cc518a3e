"""`cluster/llama_cpp/tiles.h` on any x86-64 machine: a real compiler, a watched instruction."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from cluster.llama_cpp import probe
from serve_app.store.builtin_model import BUILTIN_MODEL

HEADER = Path(__file__).parents[3] / "cluster/llama_cpp/tiles.h"

# As llama.cpp fills it. The assembler's macro stands for the instruction: it copies the 64 bytes at its
# operand to `seen`, in registers that the compiler was told to leave alone.
PROGRAM = r"""
#include <immintrin.h>
#include <cstdint>
#include <cstdio>

__asm__(R"(
.macro ldtilecfg address:vararg
    leaq \address, %r11
    .irp offset, 0, 8, 16, 24, 32, 40, 48, 56
    movq \offset(%r11), %r10
    movq %r10, seen+\offset(%rip)
    .endr
.endm
)");

extern "C" { alignas(64) unsigned char seen[64] = {}; }

struct tile_config_t {
    uint8_t palette_id = 0;
    uint8_t start_row = 0;
    uint8_t reserved_0[14] = {0};
    uint16_t colsb[16] = {0};
    uint8_t rows[16] = {0};
};

static inline void configure() {
    static thread_local bool done = false;
    if (done) return;
    alignas(64) tile_config_t tc = {};
    tc.palette_id = 1;
    tc.rows[0] = 8;   tc.colsb[0] = 64;
    tc.rows[1] = 8;   tc.colsb[1] = 64;
    tc.rows[2] = 16;  tc.colsb[2] = 32;
    tc.rows[3] = 16;  tc.colsb[3] = 32;
    _tile_loadconfig(&tc);
    done = true;
}

__attribute__((noinline)) void multiply() { configure(); }

int main() {
    multiply();
    for (unsigned char one : seen) printf("%d ", one);
}
"""

CONFIGURATION = [
    *[1, *[0] * 15],
    *[64, 0, 64, 0, 32, 0, 32, 0],
    *[0] * 24,
    *[8, 8, 16, 16],
    *[0] * 12,
]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction of x86-64")
@pytest.mark.parametrize("level", ["-O0", "-O2", "-O3"])
def test_the_whole_configuration_is_stored_before_the_instruction(
    level: str, tmp_path: Path
) -> None:
    source, program = tmp_path / "tiles.cpp", tmp_path / "tiles"
    source.write_text(PROGRAM)
    reserved = ("-ffixed-r10", "-ffixed-r11")
    flags = (level, "-mamx-tile", "-std=gnu++17", "-fno-pie", "-no-pie", *reserved)
    command: list[str | Path] = ["g++", *flags, "-include", HEADER, source, "-o", program]
    subprocess.run(command, check=True, timeout=60)
    told = subprocess.run([program], check=True, timeout=10, capture_output=True, text=True)
    assert [int(one) for one in told.stdout.split()] == CONFIGURATION


def test_other_instructions_do_without_it(tmp_path: Path) -> None:
    source = tmp_path / "plain.cpp"
    source.write_text("#ifdef _tile_loadconfig\n#error\n#endif\n")
    command: list[str | Path] = [
        "g++",
        "-include",
        HEADER,
        "-c",
        source,
        "-o",
        tmp_path / "plain.o",
    ]
    subprocess.run(command, check=True, timeout=60)


def test_the_probe_finds_that_the_kernels_of_this_machine_are_right() -> None:
    assert probe.agree(BUILTIN_MODEL)
