"""Pieces come from other nodes: right, damaged or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serve_app import locks
from serve_app.config.sources import DownloadsConfig, ModelSource
from serve_app.errors import ConfigError
from serve_app.llama.model import Model
from serve_app.progress import Stage, nowhere
from serve_app.store.models import locate, pinned, vocabulary
from serve_app.store.remote import Holder, Listing, Peers, RemoteFile, Sharing, UnreachableError
from tests.integration.store.hub_server import Hub

ONE = ModelSource(repo="owner/name:Q4_0")
NAME = "tiny-Q4_0.gguf"


THERE = Holder(0, "there", "/there")


@dataclass
class Neighbour(Sharing, Peers):
    """One other node that has the file."""

    content: bytes
    fails: int = 0
    """So many of its answers break off. The pieces come from the origin instead."""
    n_avoided: int = 0
    headers: bool = True
    listings: dict[str, Listing] = field(default_factory=dict)
    announced: list[Path] = field(default_factory=list)
    is_withdrawn: bool = False
    n_given: int = 0
    taking: threading.Lock = field(default_factory=threading.Lock)

    def peers(self, file: RemoteFile, path: Path, stop: threading.Event) -> Neighbour:
        return self

    def announce(self, file: RemoteFile, path: Path, *, is_whole: bool = True) -> None:
        self.announced.append(path)

    def read_header(self, file: RemoteFile, start: int, end: int) -> bytes | None:
        return self.content[start:end] if self.headers else None

    def put_listing(self, name: str, listing: Listing) -> None:
        self.listings[name] = listing

    def listing(self, name: str) -> Listing | None:
        return self.listings.get(name)

    def upstream(self) -> Holder | None:
        with self.taking:
            if self.n_avoided:
                self.n_avoided -= 1
                return None
            return THERE

    def read(self, holder: Holder, piece: int, start: int, end: int) -> Iterator[bytes]:
        middle = (start + end) // 2
        yield self.content[start:middle]
        with self.taking:
            self.fails -= 1
            if self.fails >= 0:
                raise ConnectionError
            self.n_given += 1
        yield self.content[middle:end]

    def avoid(self, holder: Holder, error: Exception) -> None:
        with self.taking:
            self.n_avoided += 1

    def step_back(self) -> bool:
        return False

    def withdraw(self) -> None:
        self.is_withdrawn = True


@pytest.fixture(autouse=True)
def forget_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_open", {})


@pytest.fixture
def neighbour(hub: Hub) -> Neighbour:
    """It has the whole file."""
    return Neighbour(hub.files[NAME])


def test_all_may_come_from_another_node(
    hub: Hub, downloads: DownloadsConfig, neighbour: Neighbour
) -> None:
    told: list[Stage] = []
    path = locate(ONE, downloads, told.append, neighbour)
    assert path.read_bytes() == neighbour.content
    assert hub.n_bytes[NAME] == 1  # whether this node may have it
    assert neighbour.announced == [path]
    assert (told[-1].from_origin_bytes, told[-1].from_nodes_bytes) == (0, len(neighbour.content))
    assert locate(ONE, downloads, nowhere, neighbour) == path
    assert neighbour.announced == [path, path]


def test_what_a_node_does_not_give_comes_from_the_hub(
    hub: Hub, downloads: DownloadsConfig, neighbour: Neighbour
) -> None:
    neighbour.fails = 2
    told: list[Stage] = []
    path = locate(ONE, downloads, told.append, neighbour)
    assert path.read_bytes() == neighbour.content
    last = told[-1]
    assert last.from_origin_bytes == hub.n_bytes[NAME] - 1 > 0
    assert last.from_nodes_bytes > 0
    assert last.from_origin_bytes + last.from_nodes_bytes == len(neighbour.content)


def test_what_is_damaged_is_downloaded_without_other_nodes(
    hub: Hub, downloads: DownloadsConfig, neighbour: Neighbour, caplog: pytest.LogCaptureFixture
) -> None:
    right = neighbour.content
    neighbour.content = right[:-1] + bytes([right[-1] ^ 1])
    told: list[Stage] = []
    path = locate(ONE, downloads, told.append, neighbour)
    assert path.read_bytes() == right
    assert neighbour.is_withdrawn
    assert hub.n_bytes[NAME] == len(right) + 1
    assert told[-1].done == 1.0
    assert "arrived damaged, in part from other nodes" in caplog.text


def test_a_hub_that_lies_is_asked_once_more_only(
    hub: Hub, downloads: DownloadsConfig, neighbour: Neighbour
) -> None:
    hub.lies = True
    neighbour.content = neighbour.content[:-1] + b"?"
    with pytest.raises(ConfigError, match="arrived damaged: its SHA-256"):
        locate(ONE, downloads, nowhere, neighbour)
    assert hub.n_bytes[NAME] == len(neighbour.content) + 1


def test_a_header_may_come_from_another_node(
    hub: Hub, downloads: DownloadsConfig, neighbour: Neighbour
) -> None:
    path = vocabulary(ONE, downloads, neighbour)
    assert Model(path, vocab_only=True).n_vocab == 512
    assert hub.n_bytes[NAME] == 1
    assert neighbour.announced == [path]
    hub.token, hub.is_gated = "secret", True
    elsewhere = DownloadsConfig(folder=path.parent / "elsewhere")
    with pytest.raises(ConfigError, match="HF_TOKEN is missing or wrong"):
        vocabulary(ONE, elsewhere, neighbour)


def test_a_node_takes_nothing_that_the_hub_refuses(
    hub: Hub, downloads: DownloadsConfig, neighbour: Neighbour
) -> None:
    hub.token, hub.is_gated = "secret", True
    with pytest.raises(ConfigError, match="HF_TOKEN is missing or wrong"):
        locate(ONE, downloads, nowhere, neighbour)
    assert neighbour.n_given == 0


def test_a_node_that_reaches_no_hub_has_all_from_others(
    hub: Hub,
    downloads: DownloadsConfig,
    neighbour: Neighbour,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = pinned(ONE, downloads)
    neighbour.headers = False
    vocabulary(source, downloads, neighbour)
    neighbour.headers = True
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elsewhere = DownloadsConfig(folder=tmp_path / "elsewhere")
    with pytest.raises(UnreachableError):
        locate(source, elsewhere, nowhere)
    assert Model(vocabulary(source, elsewhere, neighbour), vocab_only=True).n_vocab == 512
    assert locate(source, elsewhere, nowhere, neighbour).read_bytes() == neighbour.content


def test_a_url_is_known_from_others(
    hub: Hub,
    downloads: DownloadsConfig,
    neighbour: Neighbour,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = ModelSource(url=f"{hub.url}/owner/name/resolve/main/{NAME}")
    locate(source, downloads, nowhere, neighbour)

    def gone(*_: object, **__: object) -> None:
        raise TimeoutError

    for method in ("info", "cat_file"):
        monkeypatch.setattr(f"fsspec.implementations.http.HTTPFileSystem.{method}", gone)
    elsewhere = DownloadsConfig(folder=tmp_path / "elsewhere")
    assert locate(source, elsewhere, nowhere, neighbour).read_bytes() == neighbour.content


def test_who_does_not_share_asks_nobody(
    hub: Hub, downloads: DownloadsConfig, neighbour: Neighbour
) -> None:
    downloads = downloads.model_copy(update={"share": False})
    assert locate(ONE, downloads, nowhere, neighbour).read_bytes() == neighbour.content
    assert hub.n_bytes[NAME] == len(neighbour.content)
    assert neighbour.announced == []
