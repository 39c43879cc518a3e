"""Models in several files: their names and sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_app.base.errors import ConfigError
from serve_app.config import shards


def test_the_size_of_a_model_is_that_of_all_its_files(tmp_path: Path) -> None:
    for number, size in ((1, 10), (2, 7), (3, 5)):
        (tmp_path / f"a-{number:05d}-of-00003.gguf").write_bytes(bytes(size))
    (tmp_path / "b.gguf").write_bytes(bytes(3))
    assert shards.size_on_disk(tmp_path / "a-00001-of-00003.gguf") == 22
    assert shards.size_on_disk(tmp_path / "b.gguf") == 3
    with pytest.raises(ConfigError, match="Name the first one"):
        shards.size_on_disk(tmp_path / "a-00002-of-00003.gguf")


def test_a_file_that_is_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a-00001-of-00002.gguf").touch()
    with pytest.raises(FileNotFoundError):
        shards.size_on_disk(tmp_path / "a-00001-of-00002.gguf")


def test_what_openvinos_exporter_wrote_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "openvino_model.xml"):
        with pytest.raises(ConfigError, match=r"is no GGUF file, .* in OpenVINO's exported format"):
            shards.refuse_exported(path)
    shards.refuse_exported(tmp_path / "a.gguf")
