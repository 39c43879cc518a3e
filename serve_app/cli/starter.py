"""The process of `corral serve` that holds Ray and Serve. It sets up what `make serve` does.

    python -m serve_app.cli.starter CONFIG EVENTS

Writes lines of JSON to the file descriptor EVENTS: {"kind": ..., "text": ...}. Kinds are `ray`, `logs` (its
text is Ray's folder), `serve`, `deployed`, `running`, and `failed` (its text says why). Ends in order on
SIGINT, on SIGTERM, and when its standard input ends, as it does with the process that has started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from cluster import one_machine

_LOOK_EVERY_S = 0.5


def main() -> None:
    """Serve until it is told to stop; exits with 1 if the application cannot be started."""
    config, events = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_watch_parent, daemon=True).start()
    with one_machine.prepared(config):
        _serve(config, events)


def _tell(events: int, kind: str, text: str = "") -> None:
    os.write(events, json.dumps({"kind": kind, "text": text}).encode() + b"\n")


def _watch_parent() -> None:
    while os.read(0, 1):  # not by sys.stdin, whose lock would be held at the end
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _serve(config: Path, events: int) -> None:
    import ray  # reads the environment

    _tell(events, "ray")
    importing = threading.Thread(target=_import_serve)
    importing.start()  # while Ray's processes start
    ray.init(namespace="serve", include_dashboard=False)
    importing.join()
    _tell(events, "logs", _session_folder())
    from ray import serve

    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    try:
        _tell(events, "serve")
        _deploy(config)
        _tell(events, "deployed")
        problem = _follow()
        if problem is not None:
            _tell(events, "failed", problem)
            sys.exit(1)
        _tell(events, "running")
        threading.Event().wait()
    except KeyboardInterrupt:
        print("Shutting down.", flush=True)
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]


def _session_folder() -> str:
    from ray._private import worker

    node: Any = worker._global_node
    return str(node.get_session_dir_path())


def _import_serve() -> None:
    import ray.serve.scripts  # noqa: F401


def _deploy(config: Path) -> None:
    """As `serve run` does with a configuration file."""
    from ray.serve._private import api
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    wanted = ServeDeploySchema.model_validate(yaml.safe_load(config.read_text()))
    client = api.serve_start(
        http_options=wanted.http_options.model_dump(),
        proxy_location=wanted.proxy_location,
        grpc_options=gRPCOptions(**wanted.grpc_options.model_dump()),
        controller_options=wanted.controller_options,
    )
    client.deploy_apps(wanted, _blocking=False)


def _follow() -> str | None:
    """Wait until the application runs; why it cannot, if so."""
    from ray import serve

    while True:
        applications: dict[str, Any] = dict(serve.status().applications)
        states = {name: one.status.value for name, one in applications.items()}
        failed = [
            one.message for one in applications.values() if one.status.value == "DEPLOY_FAILED"
        ]
        if failed:
            return "\n".join(failed)
        if states and set(states.values()) == {"RUNNING"}:
            return None
        time.sleep(_LOOK_EVERY_S)


if __name__ == "__main__":
    main()
