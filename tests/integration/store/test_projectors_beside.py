"""A projector that is found beside its model, and that llama.cpp cannot use: the model reads text only."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import gguf
import pytest

from serve_app.base.errors import ConfigError
from serve_app.base.sharing import locks
from serve_app.config import schema
from serve_app.config.resolved import ResolvedModel
from serve_app.config.sources import DownloadsConfig
from serve_app.run.resolving import resolve
from tests.integration.store.hub_server import Hub
from tools.random_models.projector import SHAPES, write_random_projector

NAME = "mmproj-tiny.gguf"


@pytest.fixture(autouse=True)
def forget_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is as a process of its own."""
    monkeypatch.setattr(locks, "_open", {})


def resolved(downloads: DownloadsConfig, projector: Any = None) -> ResolvedModel:
    one = {"id": "m", "source": {"repo": "owner/name:Q4_0"}, "engine": {}}
    given = one if projector is None else one | {"projector": projector}
    return resolve(schema.parse({"models": [given], "downloads": downloads}))[0]


def eyes(folder: Path, n_embd: int = 256) -> bytes:
    path = folder / "eyes.gguf"
    write_random_projector(path, SHAPES["tiny-llava"], n_embd)
    return path.read_bytes()


def of_kind(folder: Path, kind: str) -> bytes:
    """A projector's file that names this kind."""
    path = folder / "kind.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.vision.projector_type", kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path.read_bytes()


def test_one_that_fits_is_taken_without_a_word(
    hub: Hub, downloads: DownloadsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.files[NAME] = eyes(tmp_path)
    assert resolved(downloads).projector is not None
    assert not caplog.records


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: of_kind(folder, "telescope"), "of the kind telescope, which this version"),
        (lambda folder: eyes(folder, 192), "it makes no embeddings of 256 numbers"),
        (lambda folder: eyes(folder)[:100], "cannot be read|is no GGUF|damaged|ends"),
    ],
    ids=["kind", "width", "damaged"],
)
def test_one_that_does_not_is_left_out_with_one_warning(
    make: Any,
    reason: str,
    hub: Hub,
    downloads: DownloadsConfig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.files[NAME] = make(tmp_path)
    with caplog.at_level(logging.WARNING, "corral"):
        assert resolved(downloads).projector is None
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert warning.startswith(
        "Model m reads text only, as the projector beside it cannot be used: "
    )
    assert warning.endswith("`projector: false`.")
    caplog.clear()
    assert re.search(reason, warning)
    assert resolved(downloads, projector=False).projector is None
    assert not caplog.records


def test_several_that_could_be_meant_are_named_in_the_warning(
    hub: Hub, downloads: DownloadsConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.files[NAME] = hub.files["mmproj-other.gguf"] = eyes(tmp_path)
    assert resolved(downloads).projector is None
    assert "choose a projector. It has: mmproj-other.gguf, mmproj-tiny.gguf." in caplog.text
    with pytest.raises(ConfigError, match=r"projector: owner/name: choose a projector"):
        resolved(downloads, projector={"repo": "owner/name"})
    assert resolved(downloads, projector={"repo": f"owner/name:{NAME}"}).projector is not None
