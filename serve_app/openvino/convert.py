"""Converts GGUF files to OpenVINO's format, once for each content.

    python -m serve_app.openvino.convert FOLDER GGUF...

The whole model is in memory meanwhile, so this runs in a process of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.openvino.readable import rounded, unreadable

logger = logging.getLogger("corral.engine")

MODEL = "openvino_model.xml"
_LIMIT_S = 1800.0
_MADE_BY = ("gguf_model.py", "graph.py", "rotary.py", "weights.py")


@cache
def versions() -> str:
    """Of what converts and computes. Raises ConfigError if OpenVINO is not installed."""
    try:
        found = version("openvino")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"engine.backend: openvino needs the package {error.name}. Install corral[openvino]."
        ) from None
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in _MADE_BY)
    return f"openvino {found}, graph {hashlib.blake2b(code, digest_size=6).hexdigest()}"


def converted(files: Sequence[Path], fingerprint: bytes, folder: Path) -> Path:
    """The file of the converted model under `folder`, which is made if it is not there. Of several
    processes that ask at once, one converts. Raises ConfigError if the model cannot be converted."""
    made = folder / f"{fingerprint.hex()[:32]}-{versions().replace(', ', '-').replace(' ', '-')}"
    with _alone(folder, made.name):
        if not (made / MODEL).is_file():
            _check(files)
            began = time.monotonic()
            logger.info("Converting %s for OpenVINO. This is done once.", files[0].name)
            _convert(files, made)
            logger.info("Converted %s in %.0f s.", files[0].name, time.monotonic() - began)
    return made / MODEL


def _check(files: Sequence[Path]) -> None:
    if reason := unreadable(files):
        raise ConfigError(
            f"engine.backend: openvino cannot compute {files[0].name}: {reason}. Use llama.cpp."
        )
    if formats := rounded(files):
        logger.info("OpenVINO computes the %s weights with 8 bits.", " and ".join(formats))


def _convert(files: Sequence[Path], made: Path) -> None:
    """In a folder of its own, which gets its name when it is whole."""
    part = Path(tempfile.mkdtemp(prefix="part-", dir=made.parent))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(part), *map(str, files)],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if done.returncode or not (part / MODEL).is_file():
            reason = (done.stderr.strip().splitlines() or ["it ended without a model"])[-1]
            raise ConfigError(
                f"{files[0].name} cannot be converted for OpenVINO: {reason} "
                "Use engine.backend: llama.cpp."
            )
        shutil.rmtree(made, ignore_errors=True)
        part.rename(made)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{files[0].name} was not converted for OpenVINO within {_LIMIT_S:.0f} seconds."
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(folder: Path, files: Sequence[Path]) -> None:
    """Write the model of these files to that folder."""
    import openvino

    from serve_app.openvino.graph import build

    openvino.save_model(build(files), folder / MODEL, compress_to_fp16=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(one) for one in sys.argv[2:]])
