"""Ray Serve on one machine, where llama.cpp lacks every cycle that Ray takes.

    python -m serve_app.cluster.one_machine CONFIG [--events FD]

Sets `one-machine.env`, and starts Ray without its dashboard, which `serve run` alone cannot leave out.
Clients come to the ingress itself, which listens as without Ray. Serve's proxy has files with more than one
application at `/`, and those with options of Serve's that only a proxy has.

Ends in order on SIGINT and on SIGTERM. With --events, it writes lines of JSON to that file descriptor:
{"kind": ..., "text": ...}. Kinds are `ray`, `logs` (its text is Ray's folder), `serve`, `deployed`,
`running`, and `failed` (its text says why). It then also ends when its standard input does, as that does
with the process that has started it.

Most of a start is imports, by seven processes. So what can run at the same time does: this process
imports while Ray's processes start, and the application is deployed while Serve's proxies start.
"""

from __future__ import annotations

import importlib
import logging
import os
import resource
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from serve_app.cluster.keeper import STOPPING, Keeper, RayLogs
from serve_app.run import preflight
from serve_app.run.program import (
    KEEP_ALIVE_S,
    Content,
    allow_most_files,
    arguments,
    content_of,
    discoverable,
    is_plain,
    tell,
    why_proxies,
)

HERE = Path(__file__).parent
_ANYWHERE = {"grpc_proxy": "", "PYTHONUTF8": "1"}
"""Settings for odd machines: gRPC would ask the proxy of `http_proxy` for loopback addresses, and Python
would write files in the locale's encoding."""
_LOOK_EVERY_S = 0.5
_CONTROLLER_EVERY_S = 0.05


def environment_of(name: str) -> dict[str, str]:
    """The variables that a file of this folder sets: `one-machine.env` or `haproxy.env`."""
    lines = (HERE / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def forbids_data_at_rest(content: Content) -> bool:
    """Whether an application of this configuration of Serve wants no prompt or answer on a disk, or not
    outside of encrypted folders."""
    return any(args.get("data_at_rest") in (False, "encrypted") for args in _args(content))


def _http_options(content: Content) -> dict[str, Any]:
    return dict(content.get("http_options") or {})


def _args(content: Content) -> list[dict[str, Any]]:
    return [one.get("args") or {} for one in content.get("applications") or []]


def prepare_environment(content: Content) -> None:
    """Set this process's environment for one machine and this configuration of Serve. Call before Ray is
    imported, which reads the environment."""
    os.environ |= environment_of("one-machine.env") | _ANYWHERE
    if forbids_data_at_rest(content):
        os.environ |= {"RAY_automatic_object_spilling_enabled": "0"}
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def start_ray() -> None:
    """Start a Ray of its own, whatever other Ray this machine runs. Enter `prepare_environment` before.

    Three of Ray's Python processes are left out: the dashboard, the log monitor, and the autoscaler's
    monitor. `keeper` reads the logs, and there is no machine to add. Ray would wait for the three, and they
    would take memory and time as long as it runs.
    """
    import ray
    from ray._private.node import Node

    for method in ("start_api_server", "start_monitor", "start_log_monitor"):
        setattr(Node, method, _nothing)
    ray.init("local", namespace="serve", include_dashboard=False, log_to_driver=False)


def _nothing(_node: Any, **_options: Any) -> None:
    """A stand-in for a method of Ray's that starts a process."""


def main() -> None:
    """Serve until Ctrl-C or SIGTERM; exits with 1 if the application cannot be started."""
    args = arguments("serve_app.cluster.one_machine", __doc__)
    allow_most_files()
    if (reason := preflight.missing()) is not None:
        tell(args.events, "failed", reason)
        sys.exit(1)
    tell(args.events, "libraries")
    content = content_of(args.config, host=args.host, port=args.port)
    prepare_environment(content)
    _serve(args.config, content, args.events)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _serve(config: Path, content: Content, events: int | None) -> None:
    import ray  # reads the environment

    tell(events, "ray")
    with ThreadPoolExecutor(1) as beside, ExitStack() as stack:
        importing = beside.submit(importlib.import_module, "serve_app.app")  # and with it Serve
        start_ray()
        keeper = _keeper(ray.nodes()[0], _http_options(content).get("port", 8000), events)  # type: ignore[no-untyped-call]
        stack.enter_context(discoverable(keeper.port, keeper.metrics))
        logs = stack.enter_context(keeper.logs.following())
        importing.result()
        tell(events, "logs", str(keeper.logs.folder.parent))
        from ray import serve

        signal.signal(signal.SIGINT, _stop)
        signal.signal(signal.SIGTERM, _stop)
        try:
            tell(events, "serve")
            problem = _deploy(config, content, beside, events) or _follow()
            if problem is None:
                tell(events, "running")
                logs.close()
                keeper.replace_program()
            tell(events, "failed", problem)
            sys.exit(1)
        except KeyboardInterrupt:
            print(STOPPING, flush=True)
            _drain()
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]


def _keeper(node: dict[str, Any], port: int, events: int | None) -> Keeper:
    from ray._private import worker

    started: Any = worker._global_node
    return Keeper(
        started.gcs_address,
        {name: started.all_processes[name][0].process.pid for name in ("raylet", "gcs_server")},
        port,
        f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}",
        RayLogs(Path(started.get_logs_dir_path())),
        has_parent=events is not None,
    )


def end(address: str) -> None:
    """End Serve in the Ray whose head has this address, for `keeper`, in a process of its own."""
    import ray
    from ray import serve

    ray.init(address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    _drain()
    serve.shutdown()  # type: ignore[no-untyped-call]


def _drain() -> None:
    """Delete the applications, whose replicas let running answers end. Serve's own shutdown would stop its
    proxies at once, and cut what they pass on."""
    from ray import serve

    for name in serve.status().applications:
        with suppress(TimeoutError):  # Serve waits for a minute at most
            serve.delete(name)


def _deploy(
    config: Path, content: Content, beside: ThreadPoolExecutor, events: int | None
) -> str | None:
    """Deploy as `serve run` does with a configuration file; why that cannot be done, if so.

    If all that the file names is Corral, the application is built here, which spares a process.
    """
    from ray.serve._private import api
    from ray.serve.config import ProxyLocation, gRPCOptions
    from ray.serve.schema import ServeDeploySchema

    deployment = ServeDeploySchema.model_validate(content)
    if "keep_alive_timeout_s" not in _http_options(content):
        deployment.http_options.keep_alive_timeout_s = KEEP_ALIVE_S
    if why_proxies(content) is None:
        deployment.proxy_location = ProxyLocation.Disabled  # the ingress listens itself
    starting = beside.submit(
        api.serve_start,
        http_options=deployment.http_options.model_dump(),
        proxy_location=deployment.proxy_location,
        grpc_options=gRPCOptions(**deployment.grpc_options.model_dump()),
        controller_options=deployment.controller_options,
    )
    client = _serve_client(starting)
    if not is_plain(content):
        client.deploy_apps(deployment, _blocking=False)
        tell(events, "deployed")
        return None
    return _deploy_here(client, config, content["applications"][0], events)


def _serve_client(starting: Future[Any]) -> Any:
    """Serve's client, as soon as the controller is there: proxies start meanwhile."""
    from ray.serve.context import _get_global_client

    while not starting.done():
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is not None:
            return client
        time.sleep(_CONTROLLER_EVERY_S)
    return starting.result()


def _deploy_here(
    client: Any, config: Path, named: dict[str, Any], events: int | None
) -> str | None:
    """Build the application that a file names in this process, and hand it to the controller."""
    from ray.serve._private.build_app import build_app
    from ray.serve.exceptions import RayServeException

    from serve_app.app import application

    try:
        app = application(named.get("args") or {}, config)
    except RayServeException as error:
        return str(error)
    route = named.get("route_prefix", "/")
    built = build_app(app, name=named.get("name", "default"), route_prefix=route)
    tell(events, "deployed")
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
