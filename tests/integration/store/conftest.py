"""A hub of our own, with a small model in one and in three files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from serve_app.config.sources import DownloadsConfig
from tests.integration.store import hub_server
from tests.integration.store.hub_server import Hub
from tests.integration.store.sharded import split


@pytest.fixture(scope="session")
def shards(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The tiny model in three files."""
    return split(tiny_gguf, tmp_path_factory.mktemp("shards") / "tiny-Q8_0", 3)


@pytest.fixture
def hub(
    tiny_gguf: Path, shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """Answers as HF_ENDPOINT. Nobody waits before asking it again."""
    whole = tiny_gguf.read_bytes()
    files = {path.name: path.read_bytes() for path in shards}
    files |= {"tiny-Q4_0.gguf": whole, "mmproj-tiny.gguf": b"eyes", "README.md": b"# tiny"}
    made = Hub(files, {"tiny-Q4_0.gguf": whole + b"older"})
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "library-cache"))
    quick = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
    for module in ("huggingface_hub.file_download", "huggingface_hub.utils._http"):
        monkeypatch.setattr(f"{module}.time", quick)
    with hub_server.running(made):
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


@pytest.fixture
def downloads(tmp_path: Path) -> DownloadsConfig:
    """A folder of the test's own."""
    return DownloadsConfig(folder=tmp_path / "models")
