"""llama.cpp's own `llama-batched-bench` on lines of a batch."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.batch.people import Shape
from serve_app.cli.measure.benchmark import BenchmarkError

NATIVE = "llama-batched-bench"
SIZES = (4, 8, 16, 32)
"""Lines at once, of which it is fastest with one."""
_TIMEOUT_S = 600
_N_BATCH = 512


def tokens_per_s(
    binary: Path, model: Path, shape: Shape, sizes: Sequence[int], threads: int
) -> dict[int, float]:
    """Generated tokens in a second, prompts' time included, by lines at once. The binary computes each
    size once, all prompts first, and samples nothing. Raises BenchmarkError."""
    arguments = _arguments(model, shape, sizes, threads)
    try:
        done = subprocess.run(
            [binary, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except subprocess.SubprocessError as error:
        raise BenchmarkError(f"{NATIVE} failed: {error}") from error
    found = parse(done.stdout)
    if set(found) != set(sizes):
        raise BenchmarkError(f"{NATIVE} gave no result: {done.stdout!r}")
    return found


def _arguments(model: Path, shape: Shape, sizes: Sequence[int], threads: int) -> list[str]:
    told: dict[str, object] = {
        "-m": model,
        "-c": max(sizes) * (shape.line_prompt + shape.line_answer),
        "-b": _N_BATCH,
        "-ub": _N_BATCH,
        "-npp": shape.line_prompt,
        "-ntg": shape.line_answer,
        "-npl": ",".join(map(str, sizes)),
        "-t": threads,
        "-tb": threads,
        "-ngl": 0,
        "-fa": "auto",
        "--output-format": "jsonl",
    }
    return [str(part) for pair in told.items() for part in pair] + ["--no-kv-unified"]


def parse(output: str) -> dict[int, float]:
    """The figures in its lines of JSON: generated tokens a second of the whole run, by lines at once."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in output.splitlines() if line.startswith("{")
    ]
    return {int(row["pl"]): row["pl"] * row["tg"] / (row["t_pp"] + row["t_tg"]) for row in rows}
