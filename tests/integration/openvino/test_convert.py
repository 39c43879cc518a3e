"""Conversions of real files, and those that are killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_app.base.errors import ConfigError
from serve_app.base.progress import Stage

pytest.importorskip("openvino", reason="corral[openvino] is not installed")

import openvino
from gguf import GGMLQuantizationType as Kind

from serve_app.base.folders import PART
from serve_app.base.formats import Quantization
from serve_app.kernels.openvino import convert
from serve_app.kernels.openvino.convert import ConvertedModels, converted_file
from serve_app.kernels.openvino.gguf_model import readable
from tests.integration.openvino.random_models import Made

ASK = """
import sys
from pathlib import Path
from serve_app.kernels.openvino.convert import converted_file
from serve_app.kernels.openvino.convert import ConvertedModels
print(converted_file([Path(sys.argv[1])], b"a" * 16, ConvertedModels(Path(sys.argv[2]))), flush=True)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Made("llama", Kind.Q8_0).write(tmp_path_factory.mktemp("models") / "model.gguf")


@pytest.fixture
def models(tmp_path: Path) -> ConvertedModels:
    return ConvertedModels(tmp_path / "openvino")


def asking(path: Path, models: ConvertedModels) -> subprocess.Popen[str]:
    """Another process that wants the model; in a group of its own, with its conversion."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK, str(path), str(models.path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def parts(models: ConvertedModels) -> Iterator[Path]:
    return models.path.glob(f"*{PART}")


def wait_for_part(models: ConvertedModels) -> None:
    for _ in range(1200):
        if list(parts(models)):
            return
        time.sleep(0.05)
    raise AssertionError("nothing was converted")


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_progress_is_told_and_the_size_forecast(
    quantization: Quantization,
    tmp_path: Path,
    models: ConvertedModels,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Made("llama", Kind.Q4_0).write(tmp_path / "model.gguf")
    stages: list[Stage] = []
    with caplog.at_level(logging.INFO, "corral.engine"):
        made = converted_file([path], b"a" * 16, models, stages.append, quantization=quantization)
    done = [stage.done for stage in stages if stage.name == "converting"]
    assert len(done) >= 2
    assert done == sorted(done)
    assert 0 < done[0] < done[-1] <= 1
    assert "Converted model.gguf" in caplog.text
    n_bytes = made.with_suffix(".bin").stat().st_size
    forecast = readable([path], quantization=quantization).converted_bytes()
    assert n_bytes * 0.8 < forecast < n_bytes * 1.2


def test_of_several_that_ask_one_converts(path: Path, models: ConvertedModels) -> None:
    processes = [asking(path, models) for _ in range(3)]
    answers = {process.communicate()[0] for process in processes}
    assert len(answers) == 1
    assert openvino.Core().read_model(answers.pop().strip())
    made = next(models.path.glob("*/openvino_model.xml"))
    before = made.stat().st_mtime_ns
    assert converted_file([path], b"a" * 16, models) == made
    assert made.stat().st_mtime_ns == before


@pytest.mark.parametrize("whom", ["all", "the one that asked"])
def test_a_conversion_that_is_killed_is_never_loaded(
    path: Path, models: ConvertedModels, whom: str
) -> None:
    process = asking(path, models)
    wait_for_part(models)
    if whom == "all":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()
    made = converted_file([path], b"a" * 16, models)
    assert openvino.Core().read_model(made).outputs
    assert list(parts(models)) == []


def test_a_conversion_that_dies_says_so(
    path: Path, models: ConvertedModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "_LIMIT_S", 0.01)
    with pytest.raises(ConfigError, match=r"model\.gguf cannot be converted .* -9"):
        converted_file([path], b"a" * 16, models)


def test_without_room_nothing_is_converted(path: Path, models: ConvertedModels) -> None:
    bounded = ConvertedModels(models.path, max_bytes=1000)
    with pytest.raises(ConfigError, match="more than there is room for"):
        converted_file([path], b"a" * 16, bounded)
    assert list(parts(models)) == []
