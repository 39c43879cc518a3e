"""llama.cpp's own `llama-batched-bench` with the sizes of `loadtests.engine`'s other modes."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.engine.bare_loop import context_cells
from loadtests.engine.run import NativeRun
from serve_app.cli.measure.benchmark import BenchmarkError, Prompt, peak_bytes
from serve_app.cli.measure.process import RUN_TIMEOUT_S
from serve_app.engine import EngineOptions

NATIVE = "llama-batched-bench"
_LOOK_S = 0.02
"""Between two looks at the process's memory."""
_TRIES = 3
"""It writes from a thread that does not always get to it before the process ends."""


class BatchedBench:
    """The binary, started anew for every run; it warms itself up. It draws its own random tokens,
    decodes all sequences together, and samples nothing."""

    def __init__(self, binary: Path, model: Path, options: EngineOptions) -> None:
        self._binary, self._model, self._options = binary, model, options

    def run(self, prompts: Sequence[Prompt], max_tokens: int) -> NativeRun:
        """As many sequences and tokens as the others compute. Raises BenchmarkError."""
        arguments = bench_arguments(self._model, self._options, prompts, max_tokens)
        for _ in range(_TRIES):
            output, peak = self._start(arguments)
            if output.strip():
                break
        return parse(output, peak)

    def _start(self, arguments: Sequence[str]) -> tuple[str, int]:
        """The process's output, and the most memory that it had, in bytes."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen([self._binary, *arguments], stdout=out, stderr=log)
            try:
                peak = _wait(process)
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            log.seek(0)
            if process.returncode != 0:
                raise BenchmarkError(f"{NATIVE} ended with {process.returncode}: {log.read()}")
            return out.read(), peak


def bench_arguments(
    model: Path, options: EngineOptions, prompts: Sequence[Prompt], max_tokens: int
) -> list[str]:
    """The binary's arguments. A prompt's last row gives the first token, so that `max_tokens` tokens
    take one decode step less."""
    sizes: dict[str, object] = {
        "-m": model,
        "-c": context_cells(options),
        "-b": options.n_batch,
        "-ub": options.n_batch,
        "-npp": len(prompts[0]),
        "-ntg": max_tokens - 1,
        "-npl": len(prompts),
        "-t": options.threads,
        "-tb": options.threads,
        "-ngl": 0,
        "-fa": "on" if options.flash_attn else "off",
        "--output-format": "jsonl",
    }
    return [str(part) for pair in sizes.items() for part in pair] + ["--no-kv-unified"]


def parse(output: str, peak: int) -> NativeRun:
    """The run that the output's one line of JSON tells. Raises BenchmarkError for anything else."""
    try:
        lines: list[dict[str, Any]] = [
            json.loads(line) for line in output.splitlines() if line.strip()
        ]
        (line,) = lines  # none at all if the context was too small
        n = int(line["pl"])
        return NativeRun(
            mode=NATIVE,
            prompt_tokens=n * int(line["pp"]),
            generated_tokens=n * (int(line["tg"]) + 1),
            decoded_tokens=n * int(line["tg"]),
            prefill_s=float(line["t_pp"]),
            decode_s=float(line["t_tg"]),
            peak_bytes=peak,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BenchmarkError(f"{NATIVE} gave no result: {output!r}") from error


def _wait(process: subprocess.Popen[bytes]) -> int:
    """The most memory that the process had until it ended, in bytes."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    peak = 0
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{NATIVE} took longer than {RUN_TIMEOUT_S} s.")
        time.sleep(_LOOK_S)
    return peak
