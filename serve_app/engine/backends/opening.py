"""Opens the backend of a start's plan."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import ConfigError
from serve_app.base.progress import Report, nowhere
from serve_app.engine.backends.base import Backend
from serve_app.engine.backends.llama_cpp import LlamaBackend
from serve_app.engine.choice.choose import choose
from serve_app.engine.choice.plan import Plan
from serve_app.kernels.llama.model import Model
from serve_app.kernels.openvino import convert

logger = logging.getLogger("corral.engine")

# The priority of a conversion beside requests.
_NICENESS = 19


def open_backend(
    path: str | os.PathLike[str], options: EngineOptions, report: Report = nowhere
) -> Backend:
    """The backend of the plan that is chosen, opened; on the thread that computes. Raises ConfigError."""
    path = Path(path)
    plan = choose(path, options, report)
    try:
        backend = open_planned(plan, path, options, report)
    except ConfigError as error:
        if options.backend != "auto" or plan.kernels.backend != "openvino":
            raise
        why = f"OpenVINO could not be started: {error}".removesuffix(".")
        plan = replace(plan, kernels=plan.llama_cpp, why=why)
        backend = open_planned(plan, path, options, report)
    logger.info("The plan of %s: %s; %s.", path.name, plan, backend.cache_plan.reason)
    if plan.converts:
        threading.Thread(target=_convert, args=(path, plan, options), daemon=True).start()
    return backend


def open_planned(
    plan: Plan, path: Path, options: EngineOptions, report: Report = nowhere
) -> Backend:
    """The backend of that plan, opened; on the thread that will compute. Raises ConfigError."""
    if plan.kernels.backend == "openvino":
        convert.versions()  # says so if it is not installed
        quantization = plan.kernels.quantization
        # A measurement beside llama.cpp names the kind of its cache, too.
        options = replace(options, backend="openvino", quantization=quantization, kv_unified=None)

        from serve_app.engine.backends.openvino import open_with_openvino

        return open_with_openvino(path, options, report, plan)
    return LlamaBackend(path, options, report, plan)


def _convert(path: Path, plan: Plan, options: EngineOptions) -> None:
    """Convert the model for later starts, in a process of the lowest priority."""
    # It gets the priority of this thread, which starts it.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    try:
        model = Model(path, vocab_only=True)
        for quantization in plan.openvino.quantizations if plan.openvino else ():
            convert.converted_of(model, options.max_converted_bytes, quantization=quantization)
    except (ConfigError, OSError) as error:
        logger.warning("%s", error)
