"""Models of the Hugging Face Hub, or of another server that speaks as it does (HF_ENDPOINT).

`huggingface_hub` does the work. It knows tokens, proxies, mirrors and offline mode, and when to try again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from serve_app.base.errors import ConfigError
from serve_app.config import model_names as names
from serve_app.config.model_names import HubName
from serve_app.store import remote

_COMMIT = re.compile(r"[0-9a-f]{40}")
_LIBRARY = "corral"
# Worth another try; the library waits as long as the server says.
_BUSY = (408, 429, 500, 502, 503, 504)


class HubOrigin:
    """Reads files of a repository at one commit."""

    def __init__(self, repo: str, commit: str) -> None:
        self._repo, self._commit = repo, commit

    def read(self, file: remote.RemoteFile, start: int, end: int) -> bytes:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]  # it exports them lazily

        url = hf_hub_url(self._repo, file.path, revision=self._commit, endpoint=_endpoint())
        asked = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with (
            _explain_errors(self._repo, self._commit),
            http_stream_backoff(
                "GET",
                url,
                headers=build_hf_headers(library_name=_LIBRARY) | asked,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_status_codes=_BUSY,
            ) as response,
        ):
            hf_raise_for_status(response)
            if response.status_code != 206 and (start, end) != (0, file.n_bytes):
                raise ConfigError(f"{url}: the server sends whole files only.")
            return bytes(response.read())

    def download(self, file: remote.RemoteFile, folder: Path, on_bytes: remote.OnBytes) -> Path:
        from huggingface_hub import hf_hub_download

        bar: Any = _Bar(on_bytes)  # the library calls it, as if it were a class
        with _explain_errors(self._repo, self._commit):
            path = hf_hub_download(
                self._repo,
                file.path,
                revision=self._commit,
                local_dir=folder,
                endpoint=_endpoint(),
                library_name=_LIBRARY,
                tqdm_class=bar,
            )
        return Path(path)


class _Bar:
    """The library's progress bar and its class, of which nothing is shown: `on_bytes` gets the bytes."""

    def __init__(self, on_bytes: remote.OnBytes) -> None:
        self._on_bytes = on_bytes

    def __call__(self, **_: Any) -> _Bar:
        return self

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        self._on_bytes(int(n or 0))

    def update_transfer(self, n: float | None = 1) -> None:
        """Bytes of hf_xet's, before they are decoded and written."""

    def set_postfix_str(self, *_: object, **__: object) -> None:
        pass

    set_transfer_postfix_str = set_postfix_str


def find(name: HubName, folder: Path) -> remote.RemoteModel:
    """The model's files. The repository's listing is kept in that folder, in case the server does
    not answer later. Raises ConfigError, UnreachableError if the repository cannot be asked and was not
    before."""
    listing = _listing(name, folder)
    files = {one["path"]: remote.RemoteFile(**one) for one in listing["files"]}
    model = tuple(files[path] for path in names.parts_of(files, name))
    commit = listing["commit"]
    return remote.RemoteModel(name.repo, model, HubOrigin(name.repo, commit), commit)


def pinned(name: HubName, folder: Path) -> HubName:
    """A name at the commit, and with the file, that it means now. Raises like `find`."""
    listing = _listing(name, folder)
    first, *_ = names.choose_files([one["path"] for one in listing["files"]], name)
    return HubName(name.repo, first, listing["commit"])


def projector(name: HubName, folder: Path, beside: str | None = None) -> HubName | None:
    """The name of the projector that is meant, at its commit; see `names.projector`. Raises like `find`."""
    listing = _listing(name, folder)
    found = names.projector([one["path"] for one in listing["files"]], name, beside)
    return None if found is None else HubName(name.repo, found, listing["commit"])


def in_library_cache(model: remote.RemoteModel) -> Path | None:
    """The first file, if Hugging Face's own cache on this node holds all of them whole."""
    from huggingface_hub import try_to_load_from_cache

    paths = []
    for file in model.files if model.commit else ():
        path = try_to_load_from_cache(model.label, file.path, revision=model.commit)
        if not isinstance(path, str) or Path(path).stat().st_size != file.n_bytes:
            return None
        paths.append(Path(path))
    return paths[0] if paths else None


def _listing(name: HubName, folder: Path) -> remote.Listing:
    path = folder / f"{remote.safe(name.repo)}@{remote.safe(name.revision or 'main')}.json"
    if _COMMIT.fullmatch(name.revision or "") and (before := remote.read_listing(path)) is not None:
        return before  # which never changes

    def ask() -> remote.Listing:
        listing = _ask(name)
        remote.write_listing(
            path.with_name(f"{remote.safe(name.repo)}@{listing['commit']}.json"), listing
        )
        return listing

    return remote.ask_or_remember(path, ask, lambda: _in_library(name))


def _ask(name: HubName) -> remote.Listing:
    """The listing by the Hub's API: the library's own method for it asks a busy server once only."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]  # it exports them lazily

    url = f"{_endpoint() or constants.ENDPOINT}/api/models/{name.repo}"
    if name.revision is not None:
        url += f"/revision/{quote(name.revision, safe='')}"
    with _explain_errors(name.repo, name.revision):
        response = http_backoff(
            "GET",
            url,
            params={"blobs": True},
            headers=build_hf_headers(library_name=_LIBRARY),
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
            retry_on_exceptions=(),
            retry_on_status_codes=_BUSY,
        )
        hf_raise_for_status(response)
        info = response.json()
    files = [
        remote.RemoteFile(
            sibling["rfilename"],
            sibling.get("size") or 0,
            (sibling.get("lfs") or {}).get("sha256"),
            sibling.get("blobId") or "",
        )
        for sibling in info["siblings"]
        if sibling["rfilename"].endswith(".gguf")
    ]
    return {"commit": info["sha"], "files": [asdict(file) for file in files]}


def _in_library(name: HubName) -> remote.Listing | None:
    """The files of a repository that Hugging Face's own cache on this node has."""
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(name.repo, revision=name.revision, local_files_only=True))
    except Exception:  # there is none
        return None
    files = [
        remote.RemoteFile(path.relative_to(snapshot).as_posix(), path.stat().st_size)
        for path in sorted(snapshot.rglob("*.gguf"))
    ]
    return {"commit": snapshot.name, "files": [asdict(file) for file in files]}


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _explain_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Have the library's errors be ConfigErrors, or UnreachableErrors where another time may be better.
    Those of the disk stay."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except Exception as error:
        if isinstance(error, ConfigError) or remote.is_of_disk(error):
            raise
        cause = error
        if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            cause = error.__cause__
        if isinstance(cause, HfHubHTTPError) and cause.response.status_code not in _BUSY:
            raise ConfigError(_refusal(repo, revision, cause)) from None
        raise remote.UnreachableError(
            f"Hugging Face cannot be reached for the files of {repo} ({_first_line(cause)})."
        ) from None


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
