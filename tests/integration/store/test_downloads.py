"""Models come from a hub, whole or not at all, whatever the hub, the network and the disk do."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import constants

from serve_app.base import folders
from serve_app.base.errors import ConfigError
from serve_app.base.progress import Stage, nowhere
from serve_app.base.sharing import locks
from serve_app.config import schema
from serve_app.config.sources import DownloadsConfig, ModelSource, ProjectorSource
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.vision.senses import ProjectorFile, Senses
from serve_app.run.resolving import resolve
from serve_app.store import gguf_header, remote
from serve_app.store.models import (
    delete,
    fetch,
    locate,
    pin_source,
    pinned_projector,
    projector_beside,
    remote_model,
    vocabulary,
)
from serve_app.store.remote import UnreachableError
from tests.integration.store.hub_server import COMMIT, OLD_COMMIT, Hub
from tools.random_models.projector import SHAPES, write_random_projector

ONE = ModelSource(repo="owner/name:Q4_0")
THREE = ModelSource(repo="owner/name:Q8_0")
NAME = "tiny-Q4_0.gguf"
FIRST_SHARD = "tiny-Q8_0-00001-of-00003.gguf"


@pytest.fixture(autouse=True)
def forget_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is as a process of its own."""
    monkeypatch.setattr(locks, "_open", {})


def test_a_model_is_downloaded_once(hub: Hub, downloads: DownloadsConfig) -> None:
    told: list[Stage] = []
    path = locate(ONE, downloads, told.append)
    assert path.read_bytes() == hub.files["tiny-Q4_0.gguf"]
    assert {stage.name for stage in told} == {"downloading"}
    assert told[0].done == 0.0
    assert told[-1].done == 1.0
    assert locate(ONE, downloads, nowhere) == path
    assert hub.n_bytes["tiny-Q4_0.gguf"] == len(hub.files["tiny-Q4_0.gguf"])
    assert [*path.parent.parent.glob("*.part")] == []


def test_a_model_is_fetched_for_later_and_deleted(hub: Hub, downloads: DownloadsConfig) -> None:
    def leave(stage: Stage) -> None:
        if stage.done:
            raise ConfigError("enough")

    model = remote_model(THREE, downloads)
    with pytest.raises(ConfigError, match="enough"):
        fetch(model, downloads, leave)
    fetch(model, downloads, nowhere)
    assert sum(hub.n_bytes.values()) == model.n_bytes + len(hub.files[FIRST_SHARD])
    path = locate(THREE, downloads, nowhere)
    delete(model, downloads)
    assert path.exists()  # it is open
    locks.leave_all()
    delete(model, downloads)
    assert not path.exists()


def test_a_model_in_shards_is_loaded(hub: Hub, downloads: DownloadsConfig, tiny_gguf: Path) -> None:
    path = locate(THREE, downloads, nowhere)
    assert path.name == FIRST_SHARD
    model, whole = Model(path), Model(tiny_gguf)
    assert model.n_bytes == whole.n_bytes
    assert len(model.files) == 3
    assert model.fingerprint() != Model(tiny_gguf).fingerprint()


def test_a_path_is_the_first_shard(shards: list[Path], downloads: DownloadsConfig) -> None:
    source = ModelSource(path=shards[0])
    assert locate(source, downloads, nowhere) == shards[0]
    with pytest.raises(ConfigError, match=r"Name the first one, tiny-Q8_0-00001-of-00003.gguf"):
        locate(ModelSource(path=shards[1]), downloads, nowhere)


def test_a_missing_shard_is_named(
    shards: list[Path], downloads: DownloadsConfig, tmp_path: Path
) -> None:
    (tmp_path / shards[0].name).write_bytes(shards[0].read_bytes())
    with pytest.raises(ConfigError, match=r"there is no file .*tiny-Q8_0-00002-of-00003.gguf"):
        locate(ModelSource(path=tmp_path / shards[0].name), downloads, nowhere)


def test_the_vocabulary_needs_no_weights(
    hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "FIRST_BYTES", 8192)
    monkeypatch.setattr(gguf_header, "SHARD_BYTES", 256)
    full = Model(locate(THREE, DownloadsConfig(folder=downloads.folder / "full"), nowhere))  # type: ignore[operator]
    hub.n_bytes.clear()
    path = vocabulary(THREE, downloads)
    read = sum(hub.n_bytes.values())
    assert read < 0.2 * sum(len(hub.files[one.name]) for one in full.files)
    light = Model(path, vocab_only=True)
    assert light.vocabulary_key == full.vocabulary_key
    assert light.metadata() == full.metadata()
    assert (light.n_bytes, light.n_params) == (full.n_bytes, full.n_params)
    assert sum(one.stat().st_blocks * 512 for one in light.files) < read + 3 * 4096
    assert vocabulary(THREE, downloads) == path
    assert sum(hub.n_bytes.values()) == read


def test_a_hollow_file_is_never_taken_for_the_model(hub: Hub, downloads: DownloadsConfig) -> None:
    hollow = vocabulary(ONE, downloads)
    assert locate(ONE, downloads, nowhere) != hollow
    assert hub.n_bytes["tiny-Q4_0.gguf"] > len(hub.files["tiny-Q4_0.gguf"])


def test_a_broken_connection_goes_on_where_it_was(hub: Hub, downloads: DownloadsConfig) -> None:
    hub.breaks_after = [10_000, 0, 20_000]
    content = hub.files["tiny-Q4_0.gguf"]
    assert locate(ONE, downloads, nowhere).read_bytes() == content
    assert hub.n_bytes["tiny-Q4_0.gguf"] < 1.1 * len(content)


def test_a_hub_that_is_busy_is_asked_again(hub: Hub, downloads: DownloadsConfig) -> None:
    hub.busy = 2
    source = pin_source(ONE, downloads)
    assert hub.busy == 0
    hub.busy = 2
    assert locate(source, downloads, nowhere).is_file()


def test_damaged_content_is_refused_and_deleted(hub: Hub, downloads: DownloadsConfig) -> None:
    hub.lies = True
    with pytest.raises(ConfigError, match=r"tiny-Q4_0.gguf arrived damaged: its SHA-256 is "):
        locate(ONE, downloads, nowhere)
    assert downloads.folder is not None
    assert [*downloads.folder.rglob("*.gguf")] == []
    hub.lies = False
    assert locate(ONE, downloads, nowhere).read_bytes() == hub.files["tiny-Q4_0.gguf"]


def test_a_token_opens_a_repository_and_stays_with_the_hub(
    hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    with pytest.raises(ConfigError, match="HF_TOKEN is missing or wrong"):
        locate(ONE, downloads, nowhere)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert locate(ONE, downloads, nowhere).is_file()
    assert set(hub.cdn_tokens) == {None}


def test_what_a_repository_has_not_lists_what_it_has(hub: Hub, downloads: DownloadsConfig) -> None:
    with pytest.raises(
        ConfigError, match=f"no file of Q5_K_M.* It has: tiny-Q4_0.gguf, {FIRST_SHARD}"
    ):
        locate(ModelSource(repo="owner/name:Q5_K_M"), downloads, nowhere)
    with pytest.raises(ConfigError, match="owner/name has no branch, tag or commit v7"):
        locate(ModelSource(repo="owner/name:Q4_0@v7"), downloads, nowhere)


def test_a_repository_that_is_not_there_is_named(hub: Hub, downloads: DownloadsConfig) -> None:
    with pytest.raises(
        ConfigError, match="owner/other: Hugging Face says 404: there is no such rep"
    ):
        locate(ModelSource(repo="owner/other:Q4_0"), downloads, nowhere)


@pytest.mark.parametrize("work", [partial(locate, report=nowhere), vocabulary])
def test_a_hub_that_is_gone_when_a_file_is_wanted_may_be_back_later(
    work: Any, hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = pin_source(ONE, downloads)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UnreachableError, match="cannot be reached for the files of owner/name"):
        work(source, downloads)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert work(source, downloads).is_file()


def test_a_revision_is_pinned(hub: Hub, downloads: DownloadsConfig) -> None:
    assert pin_source(ONE, downloads).repo == f"owner/name:tiny-Q4_0.gguf@{COMMIT}"
    old = pin_source(ModelSource(repo="owner/name@v1"), downloads)
    assert old.repo == f"owner/name:tiny-Q4_0.gguf@{OLD_COMMIT}"
    assert locate(old, downloads, nowhere).read_bytes().endswith(b"older")


def test_without_a_network_it_is_what_it_was(
    hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = locate(ONE, downloads, nowhere)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert locate(ONE, downloads, nowhere) == path
    assert Model(vocabulary(ONE, downloads), vocab_only=True).n_vocab == 512
    assert len(hub.asked) == asked
    with pytest.raises(UnreachableError, match="cannot be reached for the files of owner/other"):
        locate(ModelSource(repo="owner/other:Q4_0"), downloads, nowhere)


def test_hugging_faces_own_cache_is_used(
    hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import hf_hub_download

    theirs = hf_hub_download("owner/name", "tiny-Q4_0.gguf", endpoint=hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate(ONE, downloads, nowhere) == Path(theirs)
    assert Model(vocabulary(ONE, downloads), vocab_only=True).n_vocab == 512


def test_those_who_ask_together_share_a_download(hub: Hub, downloads: DownloadsConfig) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = {*pool.map(lambda _: locate(ONE, downloads, nowhere), range(4))}
    assert len(paths) == 1
    assert hub.n_bytes["tiny-Q4_0.gguf"] == len(hub.files["tiny-Q4_0.gguf"])


def test_a_killed_download_goes_on_with_the_next_file(hub: Hub, downloads: DownloadsConfig) -> None:
    """After kill -9, no file has the model's name, and files that were whole are not downloaded again."""
    hub.held, hub.holds = threading.Event(), "00002-of"
    program = f"""
from functools import partial
from pathlib import Path
from serve_app.run.resolving import resolve
from serve_app.config import schema
from serve_app.config.sources import DownloadsConfig, ModelSource, ProjectorSource
from serve_app.base.progress import nowhere
from serve_app.store.models import locate
folder = Path({str(downloads.folder)!r})
locate(ModelSource(repo="owner/name:Q8_0"), DownloadsConfig(folder=folder), nowhere)
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        _until(
            lambda: any(asked.startswith("GET /cdn") and "00002-of" in asked for asked in hub.asked)
        )
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert downloads.folder is not None
    assert [path.name for path in downloads.folder.glob("*.part/files/*")] == [FIRST_SHARD]
    assert len([*downloads.folder.glob("*.part/coming/**/*.incomplete")]) == 1
    assert [*downloads.folder.glob("*/*.gguf")] == []
    hub.held.set()
    path = locate(THREE, downloads, nowhere)
    assert path.read_bytes() == hub.files[FIRST_SHARD]
    assert hub.n_bytes[FIRST_SHARD] == len(hub.files[FIRST_SHARD])
    assert [*downloads.folder.glob("*.part")] == []


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_full_disk_is_told_before(
    hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SPARE_BYTES", 2**60)
    with pytest.raises(ConfigError, match="more than there is room for"):
        locate(ONE, downloads, nowhere)
    assert hub.n_bytes["tiny-Q4_0.gguf"] == 0


@pytest.mark.parametrize("source", ["hub", "url"])
def test_a_disk_that_becomes_full_is_told_and_the_download_goes_on_later(
    source: str, hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    wanted = (
        ONE if source == "hub" else ModelSource(url=f"{hub.url}/owner/name/resolve/main/{NAME}")
    )
    with monkeypatch.context() as full:
        full.setattr("huggingface_hub.file_download.http_get", fill)
        full.setattr("fsspec.implementations.http.HTTPFileSystem.get_file", fill)
        with pytest.raises(ConfigError, match=r"The disk of .* is full"):
            locate(wanted, downloads, nowhere)
    assert downloads.folder is not None
    assert [*downloads.folder.glob("*/*.gguf")] == []
    assert locate(wanted, downloads, nowhere).read_bytes() == hub.files[NAME]


def test_the_least_recently_used_gives_way_and_what_is_open_never(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {name: len(content) for name, content in hub.files.items()}
    one, three = sizes["tiny-Q4_0.gguf"], sum(n for name, n in sizes.items() if "Q8_0" in name)
    bounded = DownloadsConfig(folder=tmp_path / "models", max_gib=(one + three + 1000) / 2**30)
    old = ModelSource(repo="owner/name@v1")
    first, second = locate(ONE, bounded, nowhere), locate(THREE, bounded, nowhere)
    with pytest.raises(ConfigError, match="beside the models that are in use"):
        locate(old, bounded, nowhere)
    for descriptor in locks._open.values():
        os.close(descriptor)  # as if their processes had ended
    locks._open.clear()
    locate(ONE, bounded, nowhere)
    os.utime(next((tmp_path / "models" / ".locks").glob(second.parent.name)), (0, 0))
    third = locate(old, bounded, nowhere)
    assert first.is_file()
    assert third.is_file()
    assert not second.exists()
    assert [*second.parent.glob("*.gguf")] == []


def test_a_url_is_downloaded(shards: list[Path], downloads: DownloadsConfig) -> None:
    source = ModelSource(url=shards[0].as_uri())
    path = locate(source, downloads, nowhere)
    assert path != shards[0]
    assert Model(path).n_bytes == Model(shards[0]).n_bytes
    with pytest.raises(ConfigError, match="there is no file"):
        locate(ModelSource(url=f"{shards[0].as_uri()}x"), downloads, nowhere)


def test_a_url_that_changes_meanwhile_is_refused(
    shards: list[Path], downloads: DownloadsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(shards[0].read_bytes())

    def changing_copy(_: object, source: str, target: str, **__: object) -> None:
        shutil.copyfile(source, target)
        os.utime(source, (0, 0))

    source = ModelSource(url=path.as_uri())
    with monkeypatch.context() as changing:
        changing.setattr(LocalFileSystem, "get_file", changing_copy)
        with pytest.raises(ConfigError, match="changed during the download"):
            locate(source, downloads, nowhere)
    assert locate(source, downloads, nowhere).read_bytes() == path.read_bytes()


def test_a_url_that_does_not_answer_is_what_it_was(
    hub: Hub, downloads: DownloadsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource(url=f"{hub.url}/owner/name/resolve/main/tiny-Q4_0.gguf")
    path = locate(source, downloads, nowhere)

    def gone(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr("fsspec.implementations.http.HTTPFileSystem.info", gone)
    assert locate(source, downloads, nowhere) == path


def test_a_url_over_http_is_downloaded(hub: Hub, downloads: DownloadsConfig) -> None:
    source = ModelSource(url=f"{hub.url}/owner/name/resolve/main/{NAME}")
    assert Model(vocabulary(source, downloads), vocab_only=True).n_vocab == 512
    told: list[Stage] = []
    assert locate(source, downloads, told.append).read_bytes() == hub.files[NAME]
    assert (told[-1].done, told[-1].n_bytes) == (1.0, len(hub.files[NAME]))


def test_a_url_whose_connection_breaks_is_asked_for_anew_by_the_next_start(
    hub: Hub, downloads: DownloadsConfig
) -> None:
    hub.breaks_after = [10_000]
    source = ModelSource(url=f"{hub.url}/owner/name/resolve/main/{NAME}")
    with pytest.raises(UnreachableError, match=f"{NAME} cannot be reached"):
        locate(source, downloads, nowhere)
    assert locate(source, downloads, nowhere).read_bytes() == hub.files[NAME]


@pytest.mark.parametrize("place", ["hub", "url"])
def test_a_download_ends_when_nobody_waits_for_it(
    place: str, hub: Hub, downloads: DownloadsConfig
) -> None:
    def leave(stage: Stage) -> None:
        if stage.n_bytes:
            raise ConfigError("Nobody waits.")

    source = ONE if place == "hub" else ModelSource(url=f"{hub.url}/owner/name/resolve/main/{NAME}")
    with pytest.raises(ConfigError, match=r"Nobody waits\."):
        fetch(remote_model(source, downloads), downloads, leave)
    assert downloads.folder is not None
    assert [*downloads.folder.glob("*/*.gguf")] == []


def test_a_long_download_over_http_has_all_the_time_that_it_takes() -> None:
    """aiohttp ends an answer after five minutes unless it is told otherwise."""
    files, _ = remote._open_url("https://example.org/a.gguf")
    assert files.client_kwargs["timeout"].total is None
    assert files.client_kwargs["timeout"].sock_read == remote._READ_S


def eyes(path: Path) -> bytes:
    """A projector's file for the tiny model."""
    write_random_projector(path, SHAPES["tiny-llava"], 256)
    return path.read_bytes()


def test_a_projector_comes_with_its_model(
    hub: Hub, downloads: DownloadsConfig, tmp_path: Path
) -> None:
    """By its repository's list, pinned to the commit, and downloaded as any other file."""
    hub.files["mmproj-tiny.gguf"] = eyes(tmp_path / "eyes.gguf")
    source = {"repo": "owner/name:Q4_0"}
    sized = {"n_slots": 1, "n_ctx_slot": 256}
    wanted: list[tuple[Any, str | None]] = [
        (None, "mmproj-tiny.gguf"),
        (False, None),
        ({"repo": "owner/name"}, "mmproj-tiny.gguf"),
        ({"repo": "owner/name:mmproj-tiny.gguf"}, "mmproj-tiny.gguf"),
        ({"repo_id": "owner/name", "filename": "mmproj-tiny.gguf"}, "mmproj-tiny.gguf"),
    ]
    for projector, found in wanted:
        for engine in ({}, sized):
            model = {"id": "m", "source": source, "engine": engine}
            given = model if projector is None else model | {"projector": projector}
            (one,) = resolve(schema.parse({"models": [given], "downloads": downloads}))
            name = None if found is None else f"owner/name:{found}@{COMMIT}"
            assert (one.projector and one.projector.repo) == name
            if one.projector is not None:
                path = locate(one.projector, downloads, nowhere)
                assert path.read_bytes() == hub.files["mmproj-tiny.gguf"]
                assert ProjectorFile(vocabulary(one.projector, downloads)).senses == Senses(
                    sees=True
                )
    assert hub.n_bytes["mmproj-tiny.gguf"] <= 2 * len(hub.files["mmproj-tiny.gguf"])


def test_a_repository_without_a_projector_needs_none_and_lists_what_it_has(
    hub: Hub, downloads: DownloadsConfig
) -> None:
    hub.files["mmproj-other.gguf"] = hub.files["mmproj-tiny.gguf"]
    with pytest.raises(ConfigError, match=r"It has: mmproj-other.gguf, mmproj-tiny.gguf"):
        projector_beside(ONE, downloads)
    del hub.files["mmproj-tiny.gguf"], hub.files["mmproj-other.gguf"]
    assert projector_beside(ONE, downloads) is None
    assert projector_beside(ModelSource(path=Path("/nowhere.gguf")), downloads) is None
    with pytest.raises(ConfigError, match="holds no projector"):
        pinned_projector(ProjectorSource(repo="owner/name"), downloads)
