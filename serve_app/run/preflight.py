"""Finds what this machine lacks to serve, before anything is started."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from serve_app.base.errors import ConfigError
from serve_app.base.folders import cache_folder

_SOCKET_BYTES = 107
"""The longest path of a socket. Source: unix(7)."""
_RAYS_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store"
"""The path that Ray puts behind its temporary folder."""
_TOKEN_SETTINGS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def missing(*, with_ray: bool = True) -> str | None:
    """The first reason why nothing can be served here, in one line; None if there is none."""
    return _first(partial(_reasons, Path("/dev/shm"), with_ray=with_ray))


def require_cache() -> None:
    """Raises ConfigError where this process has no folder for logs and profiles."""
    if (reason := _first(_reasons_of_cache)) is not None:
        raise ConfigError(reason)


def _first(reasons: Callable[[], Iterator[str]]) -> str | None:
    try:
        return next(reasons(), None)
    except RuntimeError:  # of pathlib
        return "This user has no home folder. Set HOME to a folder that this user may write to."


def _reasons(shared_memory: Path, *, with_ray: bool) -> Iterator[str]:
    if with_ray:
        yield from _reasons_of_ray(shared_memory)
    elif not _can_write(Path("/tmp")):
        yield "The temporary folder /tmp cannot be written to."
    yield from _reasons_of_cache()


def _reasons_of_cache() -> Iterator[str]:
    if not _can_write(cache_folder()):
        yield (
            f"Logs and profiles are in {cache_folder()}, which cannot be written to. Set XDG_CACHE_HOME to "
            "another folder."
        )


def _reasons_of_ray(shared_memory: Path) -> Iterator[str]:
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    most = _SOCKET_BYTES - len(_RAYS_SOCKET)
    if len(temporary) > most:
        yield (
            f"The temporary folder's path has {len(temporary)} characters, and Ray's sockets leave room "
            f"for {most}. Set RAY_TMPDIR to a shorter one: {temporary}"
        )
    for folder in dict.fromkeys((Path("/tmp"), Path(temporary))):
        if not _can_write(folder):
            yield f"The temporary folder {folder} cannot be written to."
    if not _can_write(shared_memory):
        yield f"{shared_memory} cannot be written to, and Ray's processes share memory there."
    if not any(os.environ.get(name) for name in _TOKEN_SETTINGS):
        token = Path.home() / ".ray" / "auth_token"
        if not (os.access(token, os.R_OK) or _can_write(token.parent)):
            yield (
                f"Ray keeps a token in {token.parent}, which cannot be written to. Set HOME to "
                "another folder."
            )


def _can_write(folder: Path) -> bool:
    """Whether files can be made in the folder, which may have to be made itself."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
