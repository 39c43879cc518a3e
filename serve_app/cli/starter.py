"""The process of `corral serve` that holds Ray and Serve. It sets up what `make serve` does.

    python -m serve_app.cli.starter CONFIG EVENTS

Writes lines of JSON to the file descriptor EVENTS: {"kind": ..., "text": ...}. Kinds are `ray`, `logs` (its
text is Ray's folder), `serve`, `deployed`, `running`, and `failed` (its text says why). Ends in order on
SIGINT, on SIGTERM, and when its standard input ends, as it does with the process that has started it.

Most of a start is imports, by seven processes. So what can run at the same time does: this process imports
while Ray's processes start, and the application is deployed while Serve's proxies start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from serve_app.start import one_machine

_LOOK_EVERY_S = 0.5
_CONTROLLER_EVERY_S = 0.05
_PLAIN = {"proxy_location", "http_options", "grpc_options", "applications"}
_PLAIN_APPLICATION = {"name", "route_prefix", "import_path", "args"}


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
    import ray  # noqa: F401  # reads the environment

    _tell(events, "ray")
    with ThreadPoolExecutor(1) as beside:
        importing = beside.submit(_import_serve)
        one_machine.start_ray()
        importing.result()
        _tell(events, "logs", _session_folder())
        from ray import serve

        signal.signal(signal.SIGINT, _stop)
        signal.signal(signal.SIGTERM, _stop)
        try:
            _tell(events, "serve")
            problem = _deploy(config, beside, events) or _follow()
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
    import serve_app.app  # noqa: F401  # and with it Serve


def _deploy(config: Path, beside: ThreadPoolExecutor, events: int) -> str | None:
    """Deploy as `serve run` does with a configuration file; why that cannot be done, if so.

    If all that the file names is Corral, the application is built here, which spares a process.
    """
    from ray.serve._private import api
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load(config.read_text())
    deployment = ServeDeploySchema.model_validate(content)
    starting = beside.submit(
        api.serve_start,
        http_options=deployment.http_options.model_dump(),
        proxy_location=deployment.proxy_location,
        grpc_options=gRPCOptions(**deployment.grpc_options.model_dump()),
        controller_options=deployment.controller_options,
    )
    client = _client(starting)
    if not is_plain(content):
        client.deploy_apps(deployment, _blocking=False)
        _tell(events, "deployed")
        return None
    return _deploy_here(client, content["applications"][0], events)


def _client(starting: Future[Any]) -> Any:
    """Serve's client, as soon as the controller is there: proxies start meanwhile."""
    from ray.serve.context import _get_global_client

    while not starting.done():
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is not None:
            return client
        time.sleep(_CONTROLLER_EVERY_S)
    return starting.result()


def is_plain(content: dict[str, Any]) -> bool:
    """Whether the file says no more than what Corral serves, and where."""
    applications = content.get("applications") or []
    return (
        content.keys() <= _PLAIN
        and len(applications) == 1
        and applications[0].keys() <= _PLAIN_APPLICATION
        and applications[0].get("import_path") == "serve_app.app:build"
    )


def _deploy_here(client: Any, application: dict[str, Any], events: int) -> str | None:
    """Build the application in this process, and hand it to the controller."""
    from ray.serve._private.build_app import build_app
    from ray.serve.exceptions import RayServeException

    from serve_app.app import build

    try:
        app = build(application.get("args") or {})
    except RayServeException as error:
        return str(error)
    route = application.get("route_prefix", "/")
    built = build_app(app, name=application.get("name", "default"), route_prefix=route)
    _tell(events, "deployed")
    client.deploy_applications(
        [built], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )
    return None


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
