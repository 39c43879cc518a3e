"""Profiles and the modes chosen by them, kept on disk: a start does not measure again what is known."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from serve_app.engine.autotune.cost_model import Profile
from serve_app.engine.autotune.modes import Mode, ModeChoice
from serve_app.llama.threads import Threads

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger("corral.engine")

_FORMAT = 7
_Kept = TypeVar("_Kept")


def key(**measured_with: object) -> str:
    """A name for a profile made under these conditions, on this kind of processor."""
    conditions = {"format": _FORMAT, "cpu": _processor(), **measured_with}
    text = json.dumps(conditions, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load(folder: Path, name: str) -> ModeChoice | None:
    """The choice that was kept under that name; None if nothing was, or if the file is damaged."""
    return load_as(folder, name, _parse)


def save(folder: Path, name: str, choice: DataclassInstance) -> None:
    """Keep it; a folder that cannot be written to is only worth a warning."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(json.dumps(dataclasses.asdict(choice)).encode())
        Path(file.name).replace(folder / f"{name}.json")
    except OSError as error:
        logger.warning("The profile cannot be kept in %s: %s", folder, error)


def load_as(folder: Path, name: str, parse: Callable[[object], _Kept]) -> _Kept | None:
    """Load another kind of choice: `parse` makes it of the document, or raises ValueError or
    TypeError."""
    path = folder / f"{name}.json"
    try:
        return parse(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        logger.warning("The profile in %s cannot be used and is measured again: %s", path, error)
        return None


def _parse(document: object) -> ModeChoice:
    """Raises ValueError or TypeError for anything but what `save` writes."""
    match document:
        case {
            "mode": {"flash_attn": bool(flash_attn), "kv_unified": bool(kv_unified)},
            "reason": str(reason),
            "profile": dict(profile),
            **others,
        }:
            threads, other = _threads(others.get("threads")), _other(others.get("other"))
            return ModeChoice(
                Mode(flash_attn, kv_unified), reason, _profile(profile), threads, other
            )
    raise TypeError("it holds no profile")


def _other(document: object) -> tuple[Mode, Profile] | None:
    match document:
        case [
            {"flash_attn": bool(flash_attn), "kv_unified": bool(kv_unified)},
            dict(profile),
        ]:
            return Mode(flash_attn, kv_unified), _profile(profile)
        case None:
            return None
    raise TypeError(f"the other mode is {document!r}")


def _threads(document: object) -> Threads | None:
    match document:
        case {
            "one_row": int(one_row),
            "few_rows": int(few_rows),
            "many_rows": int(many_rows),
            "reason": str(reason),
        }:
            return Threads(one_row, few_rows, many_rows, reason)
        case None:
            return None
    raise TypeError(f"threads are {document!r}")


def _profile(document: Mapping[str, object]) -> Profile:
    known = dataclasses.asdict(Profile())
    fields: dict[str, Any] = {}
    for name, value in document.items():
        match known.get(name), value:
            case dict(), dict(curve):
                fields[name] = {int(n): float(seconds) for n, seconds in curve.items()}
            case int() | float(), int() | float():
                fields[name] = value
            case _:
                raise TypeError(f"{name} is {value!r}")
    return Profile(**fields)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
