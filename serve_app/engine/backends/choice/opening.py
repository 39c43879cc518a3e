"""Opens a backend by its name."""

from __future__ import annotations

from pathlib import Path

from serve_app import progress
from serve_app.engine.backends.base import Backend
from serve_app.engine.options import EngineOptions, KernelsName
from serve_app.errors import ConfigError
from serve_app.openvino.exported.files import ONLY_OPENVINO, is_graph
from serve_app.progress import Report


def open_named(
    name: KernelsName, path: Path, options: EngineOptions, report: Report = progress.nowhere
) -> Backend:
    """Open that backend with a model, on the thread that will compute. Raises ConfigError."""
    if name == "openvino":
        try:
            from serve_app.engine.backends.openvino import OpenVinoBackend
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"engine.backend: openvino needs the package {error.name}. Install corral[openvino]."
            ) from None
        return OpenVinoBackend(path, options, report)
    if is_graph(path):
        raise ConfigError(ONLY_OPENVINO)
    from serve_app.engine.backends.llama_cpp import LlamaBackend

    return LlamaBackend(path, options, report)
