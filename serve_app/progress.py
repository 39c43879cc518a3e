"""How far the start of a model's engine is, told to whoever started the server.

A replica writes it to a file in the folder that CORRAL_PROGRESS names, if it is set; `corral serve` reads
these files. Engines know only the callable.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = "CORRAL_PROGRESS"
"""The environment variable."""
_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Stage:
    """The present stage of the work, and its progress."""

    name: str
    """"downloading", "converting", "loading" or "measuring"."""
    done: float = 0.0
    """The part of the weights that is here, converted or loaded; nothing while measuring."""
    limit_s: float | None = None
    """The most seconds that the stage takes; None: no limit."""
    from_origin_bytes: int = 0
    from_nodes_bytes: int = 0


Report = Callable[[Stage], None]
"""Any thread may call; it neither blocks for long nor raises."""


def nowhere(_: Stage) -> None:
    """A report that nobody reads."""


def to_folder(model_id: str) -> Report:
    """A report to a file of this process; to nowhere if nobody wants to know. Reads the environment."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return nowhere
    path = Path(folder) / f"{os.getpid()}.json"
    last = (0.0, "")

    def report(stage: Stage) -> None:
        nonlocal last
        now = time.monotonic()
        if stage.name == last[1] and stage.done < 1 and now - last[0] < _EVERY_S:
            return
        last = now, stage.name
        with suppress(OSError):  # the reader may have gone, with its folder
            part = path.with_suffix(".part")
            part.write_text(json.dumps({"model": model_id} | asdict(stage)))
            part.replace(path)

    return report


def read(folder: Path) -> dict[str, Stage]:
    """The last stage of each model that has told one."""
    found: dict[str, Stage] = {}
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in paths:
        with suppress(OSError, ValueError, TypeError):
            told = json.loads(path.read_text())
            model_id = told.pop("model")
            found[model_id] = Stage(**told)
    return found
