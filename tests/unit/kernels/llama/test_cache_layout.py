"""What llama.cpp's log says of a cache."""

from __future__ import annotations

import pytest

from serve_app.base.formats import CacheLayout

FULL = (
    "llama_kv_cache: size =    1.25 MiB (  5120 cells,   1 layers,  2/2 seqs), "
    "K (f16):    0.62 MiB, V (f16):    0.62 MiB"
)
WINDOW = (
    "llama_kv_cache: size =    0.62 MiB (   512 cells,   5 layers,  2/2 seqs), "
    "K (f16):    0.31 MiB, V (f16):    0.31 MiB"
)
RECURRENT = (
    "llama_memory_recurrent: size =    3.00 MiB (     2 cells,   4 layers,  2 seqs  0 rs_seq), "
    "R (f32):    1.00 MiB, S (f32):    2.00 MiB"
)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([FULL], CacheLayout(128, 0, 0, 10240 * 128)),
        ([FULL, "else", WINDOW], CacheLayout(128, 640, 0, 10240 * 128 + 1024 * 640)),
        ([RECURRENT], CacheLayout(0, 0, 3 * 2**19, 3 * 2**20)),
        ([FULL, RECURRENT], CacheLayout(128, 0, 3 * 2**19, 10240 * 128 + 3 * 2**20)),
        (
            [RECURRENT.replace("0 rs_seq", "2 rs_seq")],
            CacheLayout(0, 0, 2**19, 3 * 2**20, 2 * 2**20),
        ),
        (["something else"], None),
        ([FULL, WINDOW, WINDOW], None),
    ],
    ids=["plain", "windows", "recurrent", "hybrid", "past states", "silent", "unknown kind"],
)
def test_by_layers(lines: list[str], expected: CacheLayout | None) -> None:
    assert CacheLayout.read(lines, 128, 2) == expected


def test_heads_that_differ_by_layer_are_taken_from_the_log() -> None:
    found = CacheLayout.read([FULL], 999, 2)
    assert found == CacheLayout(127, 0, 0, round(1.24 * 2**20))
