"""Models of the Hugging Face Hub, or of another server that speaks as it does (HF_ENDPOINT).

`huggingface_hub` asks the questions: it knows tokens, proxies, mirrors, offline mode and when to try again.
Its own downloads begin anew in each process, are checked by size only, and end at 50 GB without another
package: so the bytes are fetched here, through its sessions.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serve_app.errors import ConfigError
from serve_app.store import names, remote
from serve_app.store.names import HubName

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 2**20
# Worth another try; Hugging Face's library waits as long as the server says.
_BUSY = (408, 429, 500, 502, 503, 504)
_PAUSES_S = (0.5, 1.0, 2.0, 4.0)
_MOST_PAUSE_S = 60.0


class HubOrigin:
    """Reads files of a repository at one commit."""

    def __init__(self, repo: str, commit: str) -> None:
        self._repo, self._commit = repo, commit

    def read(self, file: remote.RemoteFile, start: int, end: int) -> Iterator[bytes]:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]  # it exports them lazily

        url = hf_hub_url(self._repo, file.path, revision=self._commit, endpoint=_endpoint())
        asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        try:
            with http_stream_backoff(
                "GET",
                url,
                headers=build_hf_headers(library_name="corral") | asked,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(),  # or it asks once more when the content breaks off
                retry_on_status_codes=_BUSY,
            ) as response:
                hf_raise_for_status(response)
                if response.status_code != 206 and (start, end) != (0, file.n_bytes):
                    raise ConfigError(f"{url}: the server sends whole files only.")
                yield from response.iter_bytes(_CHUNK_BYTES)
        except HfHubHTTPError as error:
            if error.response.status_code in _BUSY:
                raise
            raise ConfigError(_refusal(self._repo, self._commit, error)) from None

    def is_current(self, file: remote.RemoteFile) -> bool:
        return True  # a commit never changes


def find(
    name: HubName, folder: Path, others: Callable[[], remote.Listing | None] = lambda: None
) -> remote.RemoteModel:
    """The model's files. The repository's listing is kept in that folder, in case the server does
    not answer later; `others` may know one, too. Raises ConfigError, UnreachableError if the repository
    cannot be asked and was not before."""
    listing = _listing(name, folder, others)
    files = {one["path"]: remote.RemoteFile(**one) for one in listing["files"]}
    model = tuple(files[path] for path in names.parts_of(files, name))
    commit = listing["commit"]
    return remote.RemoteModel(name.repo, model, HubOrigin(name.repo, commit), commit)


def files(name: HubName, folder: Path) -> list[str]:
    """The repository's files that belong to models. Raises like `find`."""
    return [str(one["path"]) for one in _listing(name, folder)["files"]]


def pinned(name: HubName, folder: Path) -> HubName:
    """A name at the commit, and with the file, that it means now. Raises like `find`."""
    listing = _listing(name, folder)
    first, *_ = names.chosen([one["path"] for one in listing["files"]], name)
    return HubName(name.repo, first, listing["commit"])


def projector(name: HubName, folder: Path, beside: str | None = None) -> HubName | None:
    """The name of the projector that is meant, at its commit; see `names.projector`. Raises like `find`."""
    listing = _listing(name, folder)
    found = names.projector([one["path"] for one in listing["files"]], name, beside)
    return None if found is None else HubName(name.repo, found, listing["commit"])


def in_library_cache(name: HubName, model: remote.RemoteModel) -> Path | None:
    """The first file, if Hugging Face's own cache on this node holds all of them whole."""
    from huggingface_hub import try_to_load_from_cache

    paths = []
    for file in model.files:
        path = try_to_load_from_cache(name.repo, file.path, revision=name.revision)
        if not isinstance(path, str) or not _is_same(Path(path), file):
            return None
        paths.append(Path(path))
    return paths[0]


def _is_same(path: Path, file: remote.RemoteFile) -> bool:
    """Whether the path holds the file, by its size, and by the sum that the library names its files by."""
    with suppress(OSError):
        blob = path.resolve(strict=True)
        named = re.fullmatch(r"[0-9a-f]{64}", blob.name) is not None
        return blob.stat().st_size == file.n_bytes and (
            file.sha256 is None or not named or blob.name == file.sha256
        )
    return False


def _listing(
    name: HubName, folder: Path, others: Callable[[], remote.Listing | None] = lambda: None
) -> remote.Listing:
    path = folder / f"{remote.safe(name.repo)}@{remote.safe(name.revision or 'main')}.json"
    if _COMMIT.fullmatch(name.revision or "") and (before := remote.kept(path)) is not None:
        return before  # which never changes

    def ask() -> remote.Listing:
        listing = _ask(name)  # of the whole repository, unlike what others know
        remote.keep(path.with_name(f"{remote.safe(name.repo)}@{listing['commit']}.json"), listing)
        return listing

    return remote.listed(path, ask, lambda: _in_library(name), others)


def _ask(name: HubName) -> remote.Listing:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = _info(name)
    except HfHubHTTPError as error:
        if error.response.status_code in _BUSY:
            raise remote.UnreachableError(f"{name.repo}: {_first_line(error)}") from None
        raise ConfigError(_refusal(name.repo, name.revision, error)) from None
    except HFValidationError as error:
        raise ConfigError(str(error)) from None
    except Exception as error:  # no network: each version of the library has its own kinds
        raise remote.UnreachableError(
            f"Hugging Face cannot be reached for the files of {name.repo} ({_first_line(error)})."
        ) from None
    files = [
        remote.RemoteFile(
            sibling.rfilename,
            sibling.size or 0,
            sibling.lfs.sha256 if sibling.lfs else None,
            sibling.blob_id or "",
        )
        for sibling in info.siblings or ()
        if names.is_known(sibling.rfilename)
    ]
    return {"commit": info.sha, "files": [asdict(file) for file in files]}


def _info(name: HubName) -> Any:
    """The Hub's description of a repository; the library asks once only. Raises what it raises."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi(endpoint=_endpoint(), library_name="corral")
    for pause_s in _PAUSES_S:
        try:
            return api.model_info(name.repo, revision=name.revision, files_metadata=True)
        except HfHubHTTPError as error:
            if error.response.status_code not in _BUSY:
                raise
            told = error.response.headers.get("Retry-After", "")
            time.sleep(min(_MOST_PAUSE_S, float(told)) if told.isdecimal() else pause_s)
    return api.model_info(name.repo, revision=name.revision, files_metadata=True)


def _in_library(name: HubName) -> remote.Listing | None:
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(name.repo, revision=name.revision, local_files_only=True))
    except Exception:  # there is none
        return None
    files = [
        remote.RemoteFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
        for path in sorted(snapshot.rglob("*"))
        if names.is_known(path.relative_to(snapshot).as_posix())
    ]
    return {"commit": snapshot.name, "files": [asdict(file) for file in files]}


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _refusal(repo: str, revision: str | None, error: Any) -> str:
    """The meaning of the Hub's refusal. It answers 401 for repositories that do not exist, too."""
    status = error.response.status_code
    if status == 401:
        return (
            f"{repo}: Hugging Face says 401: there is no such repository, or HF_TOKEN is missing or wrong "
            "for it where this runs."
        )
    if status == 403:
        return f"{repo}: Hugging Face says 403: HF_TOKEN may not read it. Accept its terms on its page."
    if status == 404 and type(error).__name__ == "RevisionNotFoundError":
        return f"{repo} has no branch, tag or commit {revision}."
    if status == 404:
        return f"{repo}: Hugging Face says 404: there is no such repository, or no such file in it."
    return f"{repo}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
