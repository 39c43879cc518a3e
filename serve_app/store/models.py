"""The way from a configured source to files on this node: all of a model, or its vocabulary alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from serve_app import folders
from serve_app.builtin_model import BUILTIN_MODEL, BUILTIN_PROJECTOR
from serve_app.config.sources import DownloadsConfig, ModelSource, ProjectorSource
from serve_app.errors import ConfigError
from serve_app.llama import shards
from serve_app.progress import Report, Stage
from serve_app.store import download, gguf_header, hub, names
from serve_app.store.folder import ModelsFolder
from serve_app.store.names import HubName
from serve_app.store.remote import (
    ALONE,
    RemoteFile,
    RemoteModel,
    Sharing,
    UnreachableError,
    find_url,
)
from serve_app.store.shared_entries import AddedModels

_LOOK_EVERY_S = 0.3
_SAY_EVERY_S = 15.0
_N_TRIES = 4
logger = logging.getLogger("corral.store")


def locate(
    source: ModelSource, configured: DownloadsConfig, report: Report, sharing: Sharing = ALONE
) -> Path:
    """The model's file, or the first of its shards, on this node, where it
    stays while this process lives; downloaded first if it has to be: `report` is told how far it is. Other
    nodes give what they have of it, and get what is here. Raises ConfigError."""
    if source.builtin:
        return _in_package(source)
    if source.path is not None:
        return _at(source.path)
    sharing = sharing if configured.share else ALONE
    model = remote_model(source, configured, sharing)
    wanted = _hub_name(source)
    path = None if wanted is None else hub.in_library_cache(wanted, model)
    if path is None:
        folder = _folder(configured)
        try:
            _obtain(model, folder, report, sharing, folder.open)
        except OSError as error:
            raise download.disk_error(folder.path, error) from error
        path = folder.of(model) / model.files[0].name
    for file in model.files:
        sharing.announce(file, path.with_name(file.name))
    return path


def fetch(model: RemoteModel, configured: DownloadsConfig, report: Report) -> None:
    """Download a model that no process has to have yet: it may go again to make room. `report` ends the
    download by raising ConfigError; the part that has arrived is kept. Raises ConfigError."""
    folder = _folder(configured)
    try:
        _obtain(model, folder, report, ALONE, folder.is_whole)
    except OSError as error:
        raise download.disk_error(folder.path, error) from error


def delete(model: RemoteModel, configured: DownloadsConfig) -> None:
    """Delete a model's files on this node, unless a process has them open."""
    _folder(configured).remove(model.folder)


def vocabulary(source: ModelSource, configured: DownloadsConfig, sharing: Sharing = ALONE) -> Path:
    """A file with the model's metadata and vocabulary, to be opened with `vocab_only`: the model's own if
    it is here, or one with a hole where the weights would be, whose first megabytes come from another node,
    or from the origin. Raises ConfigError."""
    if source.builtin:
        return _in_package(source)
    if source.path is not None:
        return _at(source.path)
    sharing = sharing if configured.share else ALONE
    model = remote_model(source, configured, sharing)
    folder = _folder(configured)
    try:
        with folder.reading(model, lambda: None):
            local = _local(model, _hub_name(source), folder)
            folder.vocabularies(model).mkdir(parents=True, exist_ok=True)
            return _hollow(model, local, folder, sharing)
    except OSError as error:
        raise download.disk_error(folder.path, error) from error


def _hollow(model: RemoteModel, local: Path | None, folder: ModelsFolder, sharing: Sharing) -> Path:
    """A GGUF model's file with a hole where the weights would be."""
    made = [folder.vocabularies(model) / file.name for file in model.files]
    for file, path in zip(model.files, made, strict=True):
        if not path.exists():
            is_first = file is model.files[0]
            first = gguf_header.FIRST_BYTES if is_first else gguf_header.SHARD_BYTES
            header = gguf_header.read(_reader(model, file, local, sharing), file.path, first)
            gguf_header.write_hollow(path, header, file.n_bytes)
        sharing.announce(file, path, is_whole=False)
    return made[0]


def pinned(source: ModelSource, configured: DownloadsConfig) -> ModelSource:
    """A source of which every node gets the same bytes: at the commit that it is now, if it is a
    repository that can be asked. Raises ConfigError."""
    name = _hub_name(source)
    if name is None:
        return source
    return ModelSource(repo=str(hub.pinned(name, _folder(configured).listings)))


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
        return names.parse(source.repo)
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


def remote_model(
    source: ModelSource, configured: DownloadsConfig, sharing: Sharing = ALONE
) -> RemoteModel:
    """The files of a model that is to be downloaded. Raises ConfigError."""
    hub_name, names_folder = _hub_name(source), _folder(configured).listings
    name = source.url if hub_name is None else str(hub_name)
    assert name is not None
    others = partial(sharing.listing, name)
    if hub_name is None:
        model = find_url(name, names_folder, others)
    else:
        model = hub.find(hub_name, names_folder, others)
    sharing.put_listing(name, model.listing)
    return model


def _obtain(
    model: RemoteModel,
    folder: ModelsFolder,
    report: Report,
    sharing: Sharing,
    is_here: Callable[[RemoteModel], bool],
) -> None:
    """Download all of it, until `is_here` says so. One process of this node downloads; the others wait for
    it."""
    progress = _Progress(model, folder, report)
    while not is_here(model):
        with folder.alone(model) as mine:
            if mine:
                folder.make_room(model)
                progress.begin()
                for file in model.files:
                    download.fetch(model.origin, file, folder.of(model), progress.more, sharing)
                progress.end()
                continue
        progress.look()
        time.sleep(_LOOK_EVERY_S)


class _Progress:
    """Says how far a download is, to `report` and in the log. Any thread."""

    def __init__(self, model: RemoteModel, folder: ModelsFolder, report: Report) -> None:
        self._model, self._folder, self._report = model, folder.of(model), report
        self._changing = threading.Lock()
        self._n_before = self._n_done = self._n_from_nodes = 0
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

    def more(self, n_bytes: int, from_node: bool) -> None:
        """Note that `n_bytes` more are here, maybe from another node."""
        with self._changing:
            self._n_done += n_bytes
            self._n_from_nodes += n_bytes if from_node else 0
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
        present = (download.n_present(self._folder, file) for file in self._model.files)
        self._n_before = self._n_done = sum(present)
        self._tell()

    def end(self) -> None:
        logger.info(
            "Downloaded %s: %.2f GiB in %.0f s%s.",
            self._model.label,
            (self._n_done - self._n_before) / 2**30,
            time.monotonic() - self._began,
            f", {self._n_from_nodes / 2**30:.2f} of them from other nodes"
            if self._n_from_nodes
            else "",
        )

    def _tell(self) -> None:
        done = min(1.0, self._n_done / max(1, self._model.n_bytes))
        n_new = self._n_done - self._n_before
        n_from_origin = n_new - self._n_from_nodes
        self._report(Stage("downloading", done, None, n_from_origin, self._n_from_nodes))


def _local(model: RemoteModel, name: HubName | None, folder: ModelsFolder) -> Path | None:
    """Where the model's files are on this node, if they are."""
    if name is not None and (path := hub.in_library_cache(name, model)) is not None:
        return path.parent
    here = folder.of(model)
    return here if all(download.is_whole(here, file) for file in model.files) else None


def _reader(
    model: RemoteModel, file: RemoteFile, local: Path | None, sharing: Sharing
) -> gguf_header.Read:
    """Reads of a file: here, from another node, or from its origin, tried again when that breaks off."""
    origin = model.origin

    def read_here(start: int, end: int) -> bytes:
        assert local is not None
        with (local / file.name).open("rb") as opened:
            opened.seek(start)
            return opened.read(end - start)

    def read(start: int, end: int) -> bytes:
        end = min(end, file.n_bytes)
        known = sharing.read_header(file, start, end)
        if known is not None:
            download.enter(origin, file)
            return known
        data = b""
        for attempt in range(_N_TRIES):
            try:
                at = start + len(data)
                for chunk in origin.read(file, at, end) if at < end else ():
                    data += chunk
                return data
            except ConfigError:
                raise
            except Exception as error:  # of a network; each library has its own kinds
                if attempt == _N_TRIES - 1:
                    raise UnreachableError(f"{file.path} cannot be read: {error}") from error
                time.sleep(0.5 * 2**attempt)
        return data

    return read if local is None else read_here
