"""What an engine says about its memory."""

from __future__ import annotations

from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import endless, options, running

MIB = 2**20


def test_the_memory_report_has_every_part() -> None:
    backend = FakeBackend(endless, n_slots=2)
    backend.memory = type(backend.memory)(
        weights_bytes=1500 * MIB,
        cache_bytes=64 * MIB,
        cache_bytes_per_slot=32 * MIB,
        cache_bytes_per_token=4,
        compute_bytes=30 * MIB,
    )
    with running(backend, options(2, cache_ram_bytes=7 * MIB)) as engine:
        assert engine.stats().memory_report() == (
            "weights 1,500 MiB, KV cache 64 MiB (32 MiB for every slot more), "
            "compute buffers 30 MiB, prefixes without a slot 7 MiB at most"
        )


def test_an_encoder_has_no_cache_to_report() -> None:
    backend = FakeBackend(endless, n_slots=2)
    backend.memory = type(backend.memory)(
        weights_bytes=86 * MIB,
        cache_bytes=0,
        cache_bytes_per_slot=0,
        cache_bytes_per_token=0,
        compute_bytes=6 * MIB,
    )
    with running(backend, options(2)) as engine:
        report = engine.stats().memory_report()
    assert report == "weights 86 MiB, no cache, compute buffers 6 MiB"
