"""Measures a backend in a process of its own, which gives all of its memory back.

    python -m serve_app.engine.backends.choice.measuring RESULT < JOB

Both are pickles: the job is what `measured` was given, the result what it returns, or a ConfigError.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from serve_app.engine.backends.choice.kernels import Measured
from serve_app.engine.backends.choice.opening import open_named
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.errors import ConfigError, EngineFailedError

_LIMIT_S = 3600.0
"""To convert a large model takes the most of it."""


def measured(name: KernelsName, path: Path, options: EngineOptions) -> Measured:
    """The costs of that backend's batches, as measured now or at an earlier start. Raises ConfigError if
    it cannot serve the model so, and EngineFailedError if nothing came of it."""
    with tempfile.TemporaryDirectory(prefix="corral-") as folder:
        result = Path(folder) / "result"
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(result)],
                input=pickle.dumps((name, path, options)),
                stdout=subprocess.DEVNULL,
                timeout=_LIMIT_S,
                check=False,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except subprocess.TimeoutExpired:
            raise EngineFailedError(f"{name} was not measured within {_LIMIT_S:.0f} s.") from None
        if done.returncode or not result.is_file():
            raise EngineFailedError(f"Measuring {name} ended with status {done.returncode}.")
        outcome = pickle.loads(result.read_bytes())
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome  # type: ignore[no-any-return]  # it is what `main` wrote


def main(result: Path) -> None:
    """Over there."""
    name, path, options = pickle.load(sys.stdin.buffer)
    try:
        with closing(open_named(name, path, replace(options, backend=name))) as backend:
            setup = backend.setup
            outcome: object = Measured(setup.mode, setup.profile, setup.undisturbed)
    except ConfigError as error:
        outcome = error
    result.write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main(Path(sys.argv[1]))
