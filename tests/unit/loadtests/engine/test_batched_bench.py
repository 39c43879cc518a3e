"""How `llama-batched-bench` is called and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.engine.batched_bench import BatchedBench, bench_arguments, parse
from serve_app.cli.measure.benchmark import BenchmarkError
from serve_app.engine import EngineOptions

OPTIONS = EngineOptions(n_slots=2, n_ctx_slot=300, threads=3, n_batch=128, flash_attn=True)
# As it writes it, of llama.cpp as vendored by llama-cpp-python 0.3.36.
LINE = (
    '{"n_kv_max": 1024, "n_batch": 512, "n_ubatch": 512, "flash_attn": 1, "is_pp_shared": 0, '
    '"n_gpu_layers": 0, "n_threads": 1, "n_threads_batch": 1, "pp": 20, "tg": 23, "pl": 2, "n_kv": 86, '
    '"t_pp": 0.5, "speed_pp": 80.0, "t_tg": 2.3, "speed_tg": 20.0, "t": 2.8, "speed": 30.7}'
)


def binary(path: Path, script: str) -> Path:
    """An executable in the place of llama.cpp's."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_arguments_have_the_other_modes_sizes() -> None:
    arguments = bench_arguments(Path("m.gguf"), OPTIONS, [(1,) * 20, (2,) * 20], 24)
    pairs = dict(zip(arguments[::2], arguments[1::2], strict=False))
    assert pairs["-c"] == "1024"  # two slots of 512 cells, as llama.cpp rounds them
    assert (pairs["-npp"], pairs["-ntg"], pairs["-npl"]) == ("20", "23", "2")
    assert (pairs["-t"], pairs["-tb"], pairs["-b"], pairs["-ub"]) == ("3", "3", "128", "128")
    assert pairs["-fa"] == "on"
    assert arguments[-1] == "--no-kv-unified"


def test_parse() -> None:
    run = parse(f"\n{LINE}\n\n", peak=7)
    assert (run.prompt_tokens, run.generated_tokens, run.decoded_tokens) == (40, 48, 46)
    assert run.prefill_tps == json.loads(LINE)["speed_pp"]
    assert run.decode_tps == pytest.approx(json.loads(LINE)["speed_tg"])
    assert run.peak_bytes == 7


@pytest.mark.parametrize("output", ["", "usage:", f"{LINE}\n{LINE}", '{"pp": 1}', "[]"], ids=repr)
def test_any_other_output_is_an_error(output: str) -> None:
    with pytest.raises(BenchmarkError, match="gave no result"):
        parse(output, peak=0)


def test_a_binary_that_fails_is_an_error(tmp_path: Path) -> None:
    failing = binary(tmp_path / "bench", "echo no such model >&2; exit 3")
    with pytest.raises(BenchmarkError, match="ended with 3: no such model"):
        BatchedBench(failing, Path("m.gguf"), OPTIONS).run([(1,)], 8)


def test_a_lost_line_is_asked_for_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    script = f"echo >> {count}; [ $(wc -l < {count}) -lt 2 ] || echo '{LINE}'"
    bench = BatchedBench(binary(tmp_path / "bench", script), Path("m.gguf"), OPTIONS)
    assert bench.run([(1,)], 8).generated_tokens == 48
    assert len(count.read_text().splitlines()) == 2
