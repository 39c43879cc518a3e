"""Converts GGUF files to OpenVINO's format, once for each content.

    python -m serve_app.kernels.openvino.convert FOLDER QUANTIZATION STAGE STAGES FIRST END GGUF...

FIRST and END bound the layers of the stage; END 0 leaves them to `divide`.

The model, or the part of it that a stage computes, is in memory meanwhile, so this runs in a process of its
own. Converted models lie in a folder with a bound: the least recently used go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from serve_app.base.errors import ConfigError
from serve_app.base.folders import GIB, PART, BoundedFolder, cache_folder, search_path, sync
from serve_app.base.progress import Report, Stage, nowhere
from serve_app.base.sharing.pacing import pace
from serve_app.kernels.openvino.architectures import ARCHITECTURES
from serve_app.kernels.openvino.gguf_model import GgufModel, readable
from serve_app.kernels.openvino.parts import WHOLE, ModelPart, ModelShape

if TYPE_CHECKING:
    from serve_app.base.formats import EmbeddingPooling, Quantization
    from serve_app.kernels.llama.model import Model

MODEL = "openvino_model.xml"
logger = logging.getLogger("corral.engine")


class ConvertedModels(BoundedFolder):
    """Converted models of this node."""

    def of(self, name: str) -> Path:
        """The model's file."""
        return self.path / name / MODEL

    def open(self, name: str) -> bool:
        """Whether the model is here. It stays until this process ends then."""
        return self.locks.share(name, self.of(name).is_file)

    def leave(self, name: str) -> None:
        """Let the model go that this process has open."""
        self.locks.leave(name)

    def alone(self, name: str) -> AbstractContextManager[int | None]:
        """The lock's descriptor if nobody else uses or makes this model. Nobody does then until the end,
        and until a process that got it has ended."""
        return self.locks.alone(name)

    def make_room(self, name: str, n_bytes: int) -> Path:
        """An empty folder for a model of that size, which becomes the model's when it is renamed. Models
        that no process has open are deleted for it. Raises ConfigError if it is not enough, and OSError."""
        part = self.path / f"{name}{PART}"
        with self.locks.alone(".room", wait=True):
            shutil.rmtree(part, ignore_errors=True)
            lacking = self.free(
                self.names() - {name}, lambda: self.lacking(n_bytes, n_bytes, self.names())
            )
            if lacking > 0:
                raise ConfigError(
                    f"The model takes {n_bytes / GIB:.2f} GiB when it is converted for OpenVINO: "
                    f"{lacking / GIB:.2f} GiB more than there is room for in {self.path}, beside the "
                    "models that are in use. Make room, or set downloads.max_converted_gib."
                )
            part.mkdir(parents=True)
        return part


def finish(part: Path) -> None:
    """Give a folder the name of the model that is in it, whole and on the disk."""
    for path in [*part.iterdir(), part]:
        sync(path)
    part.rename(part.with_name(part.name.removesuffix(PART)))


_LIMIT_S = 3600.0
_LOOK_EVERY_S, _SAY_EVERY_S = 0.3, 10.0
_BUILDING = 0.8
_MADE_BY = ("architectures.py", "gguf_model.py", "graph.py", "parts.py", "weights.py")


@cache
def versions() -> str:
    """The versions of what converts and computes. Raises ConfigError if OpenVINO is not installed."""
    try:
        found = version("openvino")
    except PackageNotFoundError as error:
        raise ConfigError(
            f"engine.backend: openvino needs the package {error.name}. Install corral[openvino]."
        ) from None
    code = b"".join((Path(__file__).parent / name).read_bytes() for name in _MADE_BY)
    return f"openvino {found}, graph {hashlib.blake2b(code, digest_size=6).hexdigest()}"


def unserved_reason(model: Model, pooling: EmbeddingPooling | None = None) -> str | None:
    """Why OpenVINO's backend cannot serve the model with the configured pooling, as a sentence; None if it
    can, as far as metadata tell."""
    kind = ARCHITECTURES.get(model.architecture)
    encodes = kind is not None and kind.encodes
    lacks = {
        "layers that are recurrent": model.is_recurrent,
        "attention to tokens behind": not (model.is_causal or encodes),
        "scores instead of texts": model.pooling_with(pooling) == "rank" and not encodes,
    }
    return next(
        (
            f"{model.path.name} has {what}, which engine.backend: openvino cannot serve. "
            "Use llama.cpp."
            for what, has in lacks.items()
            if has
        ),
        None,
    )


def converted_of(
    model: Model,
    max_bytes: int | None,
    report: Report = nowhere,
    part: ModelPart = WHOLE,
    quantization: Quantization = "none",
) -> Path:
    """Return the file of a converted model of this user on this node, as `converted_file` does."""
    models = converted_models(max_bytes)
    return converted_file(model.files, model.fingerprint(), models, report, part, quantization)


def converted_models(max_bytes: int | None) -> ConvertedModels:
    """The converted models of this user on this node, with so many bytes at most."""
    return ConvertedModels(cache_folder() / "openvino", max_bytes)


def name_of(
    fingerprint: bytes, part: ModelPart = WHOLE, quantization: Quantization = "none"
) -> str:
    """The name of a converted model, by the content of its files, or of a part of it. Raises ConfigError as
    `versions`."""
    of_part = "" if part == WHOLE else f"-{part.index + 1}-of-{part.n_parts}"
    if part.layers is not None:
        of_part += f"-layers-{part.layers.start}-{part.layers.stop}"
    rounded = f"-{quantization}" if quantization == "w8a8" else ""
    made_by = versions().replace(", ", "-").replace(" ", "-")
    return f"{fingerprint.hex()[:32]}-{made_by}{rounded}{of_part}"


def converted_file(
    files: Sequence[Path],
    fingerprint: bytes,
    models: ConvertedModels,
    report: Report = nowhere,
    part: ModelPart = WHOLE,
    quantization: Quantization = "none",
) -> Path:
    """The file of the converted model, or of a part of it. It is made if it is not there, and stays until
    this process ends. Of several processes that ask at once, one converts, and goes on if the one
    that asked for it dies. Raises ConfigError if the model cannot be converted, or has no room."""
    name = name_of(fingerprint, part, quantization)
    while not models.open(name):
        with models.alone(name) as lock:
            if lock is not None:
                model = read_model(files, part, quantization)
                if model.rounded_formats:
                    names = " and ".join(model.rounded_formats)
                    logger.info("OpenVINO computes the %s weights with 8 bits.", names)
                folder = models.make_room(name, model.converted_bytes())
                _convert(files, folder, lock, report, part, quantization)
                continue
        report(Stage("converting"))  # elsewhere
        time.sleep(_LOOK_EVERY_S)
    return models.of(name)


def shape_of(files: Sequence[Path], quantization: Quantization = "none") -> ModelShape:
    """The sizes by which the model in these files is divided. Raises ConfigError if it cannot be."""
    try:
        return readable(files, quantization=quantization).shape
    except ConfigError as error:
        raise ConfigError(f"{files[0].name} cannot be computed in stages: {error}.") from None


def read_model(
    files: Sequence[Path], part: ModelPart = WHOLE, quantization: Quantization = "none"
) -> GgufModel:
    """The model in these files, or a part of it. Raises ConfigError with a sentence."""
    try:
        return readable(files, part, quantization)
    except ConfigError as error:
        raise ConfigError(
            f"engine.backend: openvino cannot compute {files[0].name}: {error}. Use llama.cpp."
        ) from None


def _convert(
    files: Sequence[Path],
    folder: Path,
    lock: int,
    report: Report,
    part: ModelPart,
    quantization: Quantization,
) -> None:
    """Convert in another process, which has the lock, too: nobody else begins before it has ended."""
    name = files[0].name
    began = time.monotonic()
    logger.info("Converting %s for OpenVINO. This is done once.", name)
    layers = part.layers or range(0)
    numbers = part.index, part.n_parts, layers.start, layers.stop
    arguments = (folder, quantization, *numbers, *files)
    command = [sys.executable, "-m", __name__, *map(str, arguments)]
    path = {"PYTHONPATH": search_path()}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=[lock],
            env=os.environ | path,
        ) as process,
    ):
        timer = threading.Timer(_LIMIT_S, process.kill)
        timer.start()
        try:
            with pace(process.pid):
                _tell(process, name, report)
        finally:
            process.wait()
            timer.cancel()
        errors.seek(0)
        reason = (errors.read().strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
    if process.returncode:
        raise ConfigError(
            f"{name} cannot be converted for OpenVINO: {reason}. Use engine.backend: llama.cpp."
        )
    logger.info("Converted %s in %.0f s.", name, time.monotonic() - began)


def _tell(process: subprocess.Popen[str], name: str, report: Report) -> None:
    assert process.stdout is not None
    said = time.monotonic()
    for line in process.stdout:
        done = float(line)
        report(Stage("converting", done))
        if time.monotonic() - said > _SAY_EVERY_S:
            said = time.monotonic()
            logger.info("Converting %s: %.0f%%.", name, 100 * done)


def main(
    folder: Path,
    files: Sequence[Path],
    part: ModelPart = WHOLE,
    quantization: Quantization = "none",
) -> None:
    """Write the model of these files, or a part of it, to that folder, and say on the standard output how
    far it is."""
    import openvino

    from serve_app.kernels.openvino.graph import build

    def tell(built: float) -> None:
        # Nobody reads any more if the server was killed: the model is made all the same.
        with contextlib.suppress(BrokenPipeError):
            print(f"{built * _BUILDING:.3f}", flush=True)

    graph = build(files, tell, part, quantization)
    openvino.save_model(graph, folder / MODEL, compress_to_fp16=False)
    finish(folder)


if __name__ == "__main__":
    _, made, rounding, *numbers = sys.argv[:7]
    stage, stages, first, end = map(int, numbers)
    main(
        Path(made),
        [Path(path) for path in sys.argv[7:]],
        ModelPart(stage, stages, range(first, end) if end else None),
        "w8a8" if rounding == "w8a8" else "none",
    )
