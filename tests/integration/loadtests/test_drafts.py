"""The benchmark of draft models, as one runs it, with tiny models."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.engine.drafts.models import TINY, agreeing
from serve_app.engine import Engine, EngineOptions, GenerationRequest, SamplingParams

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agreeing(tmp_path_factory.mktemp("models"), TINY, "q8_0")


def test_a_model_is_made_once(path: Path) -> None:
    made = path.stat().st_mtime_ns
    assert agreeing(path.parent, TINY, "q8_0") == path
    assert path.stat().st_mtime_ns == made


async def test_the_same_token_always_follows(path: Path) -> None:
    engine = Engine.load(
        path, EngineOptions(n_slots=1, n_ctx_slot=64, threads=1, profile_limit_s=0)
    )
    try:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for prompt in ((20, 30, 40), (77, 5)):
            stream = engine.submit(GenerationRequest(str(prompt), prompt, sampling))
            assert [token async for delta in stream for token in delta.token_ids] == [0] * 8
    finally:
        engine.close()


@pytest.mark.long
def test_the_benchmark_has_a_row_for_each_number_of_streams(path: Path) -> None:
    """In processes of their own, as `python -m` has them."""
    arguments = ["--streams", "1,2", "--tokens", "12", "--rounds", "1", "--threads", "1"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "loadtests.engine.drafts",
            *("--target", str(path), "--draft", str(path), *arguments),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| ([12]) \| (.*) \|$", done.stdout, re.M)
    assert [streams for streams, _ in rows] == ["1", "2"]
    for _, row in rows:
        without, beside, ratio, proposed, right, _ = row.split(" | ")
        assert float(without) > 0
        assert float(beside) > 0
        assert float(ratio.split()[0]) > 0
        assert int(right) <= int(proposed)
