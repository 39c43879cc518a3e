"""Converts a GGUF file to OpenVINO's format, once for each content.

    python -m serve_app.openvino.convert GGUF FOLDER

The converter holds the whole model in memory while it works, so it runs in a process of its own.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve_app.errors import ConfigError
from serve_app.openvino.readable import inexact, misread

logger = logging.getLogger("corral.engine")

MODEL = "openvino_model.xml"
_PACKAGES = ("openvino", "openvino-genai")
_LIMIT_S = 1800.0


def versions() -> str:
    """Of the packages that convert and compute. Raises ConfigError if they are not installed."""
    try:
        return ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"engine.backend: openvino needs the package {error.name}. Install corral[openvino]."
        ) from None


def converted(gguf: Path, fingerprint: bytes, folder: Path) -> Path:
    """The file of the converted model under `folder`, which is made if it is not there. Of several
    processes that ask at once, one converts. Raises ConfigError if OpenVINO cannot read the model."""
    made = folder / f"{fingerprint.hex()[:32]}-{versions().replace(', ', '-').replace(' ', '-')}"
    with _alone(folder, made.name):
        if not (made / MODEL).is_file():
            _check(gguf)
            began = time.monotonic()
            logger.info("Converting %s for OpenVINO. This is done once.", gguf.name)
            _convert(gguf, made)
            logger.info("Converted %s in %.0f s.", gguf.name, time.monotonic() - began)
    return made / MODEL


def _check(gguf: Path) -> None:
    if found := misread(gguf):
        raise ConfigError(
            f"{gguf.name} has {' and '.join(found)}, which OpenVINO's reader ignores: its texts would be "
            "wrong. Use engine.backend: llama.cpp."
        )
    if formats := inexact(gguf):
        logger.warning(
            "OpenVINO rounds the offsets of %s: %s is less exact with it than with llama.cpp. Q4_0, Q6_K, "
            "Q8_0 and F16 are not.",
            " and ".join(formats),
            gguf.name,
        )


def _convert(gguf: Path, made: Path) -> None:
    """In a folder of its own, which gets its name when it is whole."""
    part = Path(tempfile.mkdtemp(prefix="part-", dir=made.parent))
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(gguf), str(part)],
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if done.returncode or not (part / MODEL).is_file():
            reason = (done.stderr.strip().splitlines() or ["it ended without a model"])[-1]
            raise ConfigError(
                f"OpenVINO cannot read {gguf.name}: {reason} Use engine.backend: llama.cpp."
            )
        shutil.rmtree(made, ignore_errors=True)
        part.rename(made)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"OpenVINO did not convert {gguf.name} within {_LIMIT_S:.0f} seconds."
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(gguf: Path, folder: Path) -> None:
    """The converter writes beside the file that it reads: so it gets a link to it in `folder`."""
    import openvino_genai

    link = folder / "model.gguf"
    link.symlink_to(gguf.resolve())
    openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    link.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
