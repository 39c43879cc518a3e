"""Profiles and the choices made by them, kept on disk: a start does not measure again what is known."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TypeVar

import msgspec

from serve_app.base.engine_options import EngineOptions
from serve_app.base.sharing.locks import FolderLocks
from serve_app.engine.costs.cost_model import Profile

logger = logging.getLogger("corral.engine")

_FORMAT = 11
# A profile is disturbed if its threads had less of their time: something else computed. Ray and its start
# take a fifth of two cores.
_ALONE = 0.75
# The options that the time of batches depends on, or the choice between kinds of batches.
_OPTIONS = (
    *("threads", "threads_batch", "numa", "n_slots", "n_ctx_slot", "n_ctx"),
    *("n_batch", "flash_attn", "kv_unified", "cache_type_k", "cache_type_v", "max_stall_ms"),
    *("profile_limit_s", "quantization", "backend"),
)
_Choice = TypeVar("_Choice")


def key(options: EngineOptions, **others: object) -> str:
    """A name for what is measured with these options, under these conditions, on this kind of processor."""
    conditions = {name: getattr(options, name) for name in _OPTIONS}
    conditions |= {"format": _FORMAT, "cpu": _processor(), **others}
    conditions["pinned"] = [len(tokens) for tokens in options.pinned]
    text = json.dumps(conditions, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(folder: Path | None, name: str, kind: type[_Choice]) -> _Choice | None:
    """The choice, a dataclass, that was kept under that name; None if there is none, or it is damaged."""
    if folder is None:
        return None
    path = folder / f"{name}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("The profile in %s cannot be used and is measured again: %s", path, error)
        return None


def save(folder: Path | None, name: str, choice: object) -> None:
    """Keep it; a folder that cannot be written to is only worth a warning."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(msgspec.json.encode(choice))
        Path(file.name).replace(folder / f"{name}.json")
    except OSError as error:
        logger.warning("The profile cannot be kept in %s: %s", folder, error)


def alone(folder: Path | None, name: str) -> AbstractContextManager[object]:
    """A context in which no other process of this node measures for that name."""
    if folder is None:
        return nullcontext()
    return FolderLocks(folder).alone(f"{name}.lock", wait=True)


def is_disturbed(profiles: Iterable[Profile]) -> bool:
    """Whether other programs computed while one of these profiles was measured."""
    return any(profile.share < _ALONE for profile in profiles)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
