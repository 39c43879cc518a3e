"""The way from a configured source to files on this node: all of a model, or its vocabulary alone."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from serve_app.base import folders
from serve_app.base.errors import ConfigError
from serve_app.base.folders import sync
from serve_app.base.progress import Report, Stage
from serve_app.config import model_names as names
from serve_app.config import shards
from serve_app.config.model_names import HubName
from serve_app.config.sources import DownloadsConfig, ModelSource, ProjectorSource
from serve_app.store import gguf_header, hub
from serve_app.store.builtin_model import BUILTIN_MODEL, BUILTIN_PROJECTOR
from serve_app.store.folder import ModelsFolder, disk_error
from serve_app.store.remote import RemoteFile, RemoteModel, find_url
from serve_app.store.shared_entries import AddedModels

_LOOK_EVERY_S = 0.3
_SAY_EVERY_S = 15.0
logger = logging.getLogger("corral.store")


def locate(source: ModelSource, configured: DownloadsConfig, report: Report) -> Path:
    """The model's file, or the first of its shards, on this node, where it stays while this process
    lives. The file is downloaded first if it has to be: `report` is told how far it is. Raises
    ConfigError."""
    if source.builtin:
        return _in_package(source)
    if source.path is not None:
        return _at(source.path)
    model = remote_model(source, configured)
    path = hub.in_library_cache(model)
    if path is None:
        folder = _folder(configured)
        _obtain(model, folder, report, folder.open)
        path = folder.of(model) / model.files[0].name
    return path


def fetch(model: RemoteModel, configured: DownloadsConfig, report: Report) -> None:
    """Download a model that no process has to have yet: it may go again to make room. `report` ends the
    download by raising ConfigError. Raises ConfigError."""
    folder = _folder(configured)
    _obtain(model, folder, report, folder.is_whole)


def delete(model: RemoteModel, configured: DownloadsConfig) -> None:
    """Delete a model's files on this node, unless a process has them open."""
    _folder(configured).delete(model)


def vocabulary(source: ModelSource, configured: DownloadsConfig) -> Path:
    """A file with the model's metadata and vocabulary, to be opened with `vocab_only`. Of a model that
    is downloaded, it has a hole where the weights would be. Only its first megabytes are read from the
    origin, unless they are here. Raises ConfigError."""
    if source.builtin:
        return _in_package(source)
    if source.path is not None:
        return _at(source.path)
    model = remote_model(source, configured)
    folder = _folder(configured)
    try:
        with folder.alone_with_vocabulary(model):
            folder.vocabularies(model).mkdir(parents=True, exist_ok=True)
            hollow = [folder.vocabularies(model) / file.name for file in model.files]
            for file, path in zip(model.files, hollow, strict=True):
                if not path.exists():
                    is_first = file is model.files[0]
                    first = gguf_header.FIRST_BYTES if is_first else gguf_header.SHARD_BYTES
                    reader = partial(_read_range, model, file, folder)
                    header = gguf_header.read_header(reader, file.path, first)
                    gguf_header.write_hollow(path, header, file.n_bytes)
    except OSError as error:
        raise disk_error(folder.path, error) from error
    return hollow[0]


def pin_source(source: ModelSource, configured: DownloadsConfig) -> ModelSource:
    """A source of which every node gets the same bytes. It is at the commit that it has now, if it is a
    repository that can be asked. Raises ConfigError."""
    name = _hub_name(source)
    if name is None:
        return source
    return ModelSource(repo=str(hub.pin(name, _folder(configured).listings)))


def pinned_projector(source: ProjectorSource, configured: DownloadsConfig) -> ProjectorSource:
    """A projector's source of which every node gets the same bytes. Raises ConfigError."""
    name = _hub_name(source)
    if name is None:
        return source
    projector = hub.projector(name, _folder(configured).listings)
    if projector is None:
        raise ConfigError(f"{name.repo} holds no projector (mmproj).")
    return ProjectorSource(repo=str(projector))


def names_a_file(source: ModelSource) -> bool:
    """Whether it means one file, whatever else a repository has."""
    wanted = _hub_name(source)
    return wanted is None or (wanted.choice or "").endswith(".gguf")


def projector_beside(source: ModelSource, configured: DownloadsConfig) -> ProjectorSource | None:
    """The projector that a model's repository has, if it is one, and has one; the built-in model has its
    own. The model's source is pinned. Raises ConfigError."""
    if source.builtin:
        return ProjectorSource(builtin=True)
    model = _hub_name(source)
    if model is None:
        return None
    wanted = HubName(model.repo, None, model.revision)
    found = hub.projector(wanted, _folder(configured).listings, model.choice)
    return None if found is None else ProjectorSource(repo=str(found))


def _at(path: Path) -> Path:
    """The model's file. Raises ConfigError unless all files of it are here."""
    path = path.expanduser()
    shards.refuse_exported(path)
    for name in shards.names(path.name):
        if not path.with_name(name).is_file():
            raise ConfigError(f"source.path: there is no file {path.with_name(name)} on this node")
    return path


def _in_package(source: ModelSource) -> Path:
    return BUILTIN_PROJECTOR if isinstance(source, ProjectorSource) else BUILTIN_MODEL


def _hub_name(source: ModelSource) -> HubName | None:
    if source.repo is not None:
        return names.parse_hub_name(source.repo)
    if source.repo_id is not None:
        return HubName(source.repo_id, source.filename)
    return None


def _path(configured: DownloadsConfig) -> Path:
    return (configured.folder or folders.cache_folder() / "models").expanduser()


def added_models(configured: DownloadsConfig, app: str | None = None) -> AddedModels:
    """The models that were added while serving: they lie beside the downloaded ones. See `AddedModels`."""
    return AddedModels(_path(configured) / ".added", app)


def _folder(configured: DownloadsConfig) -> ModelsFolder:
    most = None if configured.max_gib is None else int(configured.max_gib * 2**30)
    return ModelsFolder(_path(configured), most)


def remote_model(source: ModelSource, configured: DownloadsConfig) -> RemoteModel:
    """The files of a model that is to be downloaded. Raises ConfigError."""
    name, listings = _hub_name(source), _folder(configured).listings
    if name is not None:
        return hub.find(name, listings)
    assert source.url is not None
    return find_url(source.url, listings)


def _obtain(
    model: RemoteModel, folder: ModelsFolder, report: Report, is_here: Callable[[RemoteModel], bool]
) -> None:
    """Download all of it, until `is_here` says so. One process of this node downloads; the others wait for
    it. Raises ConfigError."""
    progress = _Progress(model, folder, report)
    try:
        while not is_here(model):
            with folder.alone(model) as lock:
                if lock is not None:
                    folder.make_room(model)
                    progress.begin()
                    for file in model.files:
                        progress.add(0)  # hf_xet does not end in the middle of a file
                        if not folder.has(model, file):
                            _download(model, file, folder, progress)
                    folder.finish(model)
                    progress.end()
                    continue
            progress.look()
            time.sleep(_LOOK_EVERY_S)
    except OSError as error:
        raise disk_error(folder.path, error) from error


def _download(
    model: RemoteModel, file: RemoteFile, folder: ModelsFolder, progress: _Progress
) -> None:
    path = model.origin.download(file, folder.coming(model), progress.add)
    if file.sha256 is not None:
        with path.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        if sha256 != file.sha256:
            path.unlink()
            raise ConfigError(
                f"{file.path} arrived damaged: its SHA-256 is {sha256} instead of {file.sha256}. It was "
                "deleted. The next try starts again."
            )
    sync(path)
    path.replace(folder.file(model, file))


class _Progress:
    """Says how far a download is, to `report` and in the log. One thread at a time."""

    def __init__(self, model: RemoteModel, folder: ModelsFolder, report: Report) -> None:
        self._model, self._folder, self._report = model, folder, report
        self._n_before = self._n_done = 0
        self._began = self._said = time.monotonic()

    def begin(self) -> None:
        """Note that the download begins in this process."""
        self.look()
        self._began = self._said = time.monotonic()
        logger.info(
            "Downloading %s: %s, %.2f GiB%s.",
            self._model.label,
            ", ".join(file.name for file in self._model.files),
            self._model.n_bytes / 2**30,
            f", of which {self._n_before / 2**30:.2f} are here" if self._n_before else "",
        )

    def add(self, n_bytes: int) -> None:
        """Note that `n_bytes` more are here."""
        self._n_done += n_bytes
        self._tell()
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        done, all_bytes = self._n_done, self._model.n_bytes
        rate = (done - self._n_before) / max(1e-3, now - self._began)
        logger.info(
            "Downloading %s: %.0f%% of %.2f GiB, %.1f MB/s, %.0f s left.",
            self._model.label,
            100 * done / all_bytes,
            all_bytes / 2**30,
            rate / 1e6,
            (all_bytes - done) / max(rate, 1.0),
        )

    def look(self) -> None:
        """Tell what is here; another process may download it."""
        self._n_before = self._n_done = self._folder.n_present(self._model)
        self._tell()

    def end(self) -> None:
        """Note that all is here."""
        self._n_done = self._model.n_bytes
        self._tell()
        logger.info(
            "Downloaded %s: %.2f GiB in %.0f s.",
            self._model.label,
            (self._n_done - self._n_before) / 2**30,
            time.monotonic() - self._began,
        )

    def _tell(self) -> None:
        done = min(1.0, self._n_done / max(1, self._model.n_bytes))
        self._report(Stage("downloading", done, n_bytes=self._n_done - self._n_before))


def _read_range(
    model: RemoteModel, file: RemoteFile, folder: ModelsFolder, start: int, end: int
) -> bytes:
    """The bytes of a file from a start up to an end, from this node if the model is here."""
    end = min(end, file.n_bytes)
    local = hub.in_library_cache(model)
    if local is None and not folder.is_whole(model):
        return model.origin.read(file, start, end) if start < end else b""
    here = folder.of(model) if local is None else local.parent
    with (here / file.name).open("rb") as opened:
        opened.seek(start)
        return opened.read(end - start)
