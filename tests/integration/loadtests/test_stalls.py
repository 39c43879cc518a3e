"""The stall benchmark and profiling, on a real tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtests.engine import stalls
from serve_app.engine import Engine, EngineOptions


def test_the_benchmark_has_a_row_for_each_bound(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--bounds", "50,none", "--prompt-tokens", "400", "--rounds", "1", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["stalls", "--model", str(tiny_gguf), *arguments])
    stalls.main()
    rows = re.findall(r"^\| (50|none) \| (.*) \|$", capsys.readouterr().out, re.M)
    assert [bound for bound, _ in rows] == ["50", "none"]
    assert all(len(row.split(" | ")) == 6 for _, row in rows)


def test_a_loaded_engine_has_measured_its_batches(tiny_gguf: Path) -> None:
    engine = Engine.load(
        tiny_gguf, EngineOptions(n_slots=3, n_ctx_slot=256, threads=1, n_batch=64, max_stall_ms=250)
    )
    try:
        step_time = engine.stats().costs.step_time
        assert list(step_time["decode_ms"]) == [1, 2, 3]
        assert list(step_time["prefill_ms"]) == [8, 16, 24, 32, 40, 48, 56, 64]
        assert list(step_time["verify_ms"]) == [2, 3, 4, 6, 8, 12, 16]
        assert all(ms > 0 for curve in step_time.values() for ms in curve.values())
        assert {slot.n_past for slot in engine.stats().slots} == {0}
    finally:
        engine.close()


def test_without_time_nothing_is_measured(tiny_gguf: Path) -> None:
    options = EngineOptions(n_slots=1, n_ctx_slot=64, threads=1, profile_limit_s=0)
    engine = Engine.load(tiny_gguf, options)
    try:
        assert engine.stats().costs.step_time == {
            "decode_ms": {},
            "prefill_ms": {},
            "verify_ms": {},
        }
    finally:
        engine.close()
