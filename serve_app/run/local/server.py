"""The server of one machine without Ray: the ingress in this process, each model in one of its own.

    python -m serve_app.run.local.server CONFIG [--events FD]

A configuration that asks for more than one machine and one replica of each model runs on Ray Serve
instead. This process becomes `serve_app.cluster.one_machine`, which has the same arguments and events.

SIGINT and SIGTERM end it in order: running answers end first, and new requests get 503 meanwhile. The same
signal again ends all streams with an error. Most of a start is imports, so the models'
processes import theirs while this one reads the configuration.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from serve_app.base import logs, metrics
from serve_app.base.errors import ConfigError, CorralError
from serve_app.run.local.handle import EngineChild, LocalHandle, folder_for
from serve_app.run.program import (
    KEEP_ALIVE_S,
    Content,
    allow_most_files,
    arguments,
    content_of,
    discoverable,
    tell,
    why_proxies,
)
from serve_app.store import shared_entries

if TYPE_CHECKING:
    from serve_app.config.resolved import ResolvedModel
    from serve_app.config.schema import AppConfig, ModelConfig
    from serve_app.run.ingress import IngressSettings
    from serve_app.store.shared_entries import AddedModels, Entry

_END_S = 30.0
"""The longest time that the running answers of a model may take when it is removed."""
_FOLDER = "corral-local-"


class ClusterNeededError(Exception):
    """The configuration asks for what only Ray Serve can do."""


def _check_replicas(app: AppConfig, models: list[ResolvedModel]) -> None:
    """Raises ClusterNeededError if a model has several replicas."""
    for configured, model in zip(app.models, models, strict=True):
        if configured.serve.autoscaling_config is not None:
            raise ClusterNeededError(f"serve.autoscaling_config of {configured.id}")
        if (configured.serve.num_replicas or model.n_replicas) > 1:
            raise ClusterNeededError(f"several replicas of {configured.id}")
    if app.ingress.serve.autoscaling_config or (app.ingress.serve.num_replicas or 1) > 1:
        raise ClusterNeededError("several replicas of the ingress")


class LocalServer:
    """The models' processes and the ingress before them, which may have models added and removed. Used in
    one event loop."""

    def __init__(
        self, app: AppConfig, models: list[ResolvedModel], settings: IngressSettings, folder: Path
    ) -> None:
        from serve_app.run.model_host import ConfiguredHost

        self._app, self.configured_models, self._folder = app, models, folder
        self._settings = settings
        host = ConfiguredHost(app, models)
        self.entry, self.resolve, self._entries = host.entry, host.resolve, host.entries
        self.handles = {
            model.id: LocalHandle(
                model, folder, _reserved_cpus(configured, model), configured.serve
            )
            for configured, model in zip(app.models, models, strict=True)
        }
        self._keeping: dict[str, asyncio.Task[None]] = {}

    async def run(
        self, children: list[EngineChild], http: Content, tell: Any
    ) -> CorralError | None:
        """Serve until a signal ends it. A model that cannot be served is left out. Returns why no model
        can be served, if that ended it."""
        from serve_app.channel import routing_reports as reports
        from serve_app.run.ingress import IngressPlace, IngressServer
        from serve_app.run.local.http import GIVEN_UP_S, DrainingServer, settings_of

        configured = [*self.handles.values()]
        for (name, handle), child in zip(self.handles.items(), children, strict=True):
            self._keeping[name] = asyncio.create_task(handle.keep(child))
        keeping = [*self._keeping.values()]
        place = IngressPlace(
            *("corral", "local", ""),
            configured,
            model_host=self if self._app.manage_models else None,
            forks_workers=True,
        )
        ingress = await IngressServer.open(self.configured_models, self._settings, place)
        assert reports.HERE.address is not None  # the ingress listens now
        for handle in configured:
            await handle.attach(reports.HERE.address)
        api = ingress.api()
        config = settings_of(
            api,
            http.get("host") or "127.0.0.1",
            http.get("port") or 8000,
            http.get("keep_alive_timeout_s") or KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(GIVEN_UP_S),
        )

        def drain() -> None:
            ingress.drain()
            for handle in self.handles.values():
                handle.drain()

        server = DrainingServer(config, api.state.streams, drain, ingress.drain_s)
        problem: CorralError | None = None

        def on_end(task: asyncio.Task[None]) -> None:
            nonlocal problem
            is_left_out = not task.cancelled() and isinstance(task.exception(), CorralError)
            if is_left_out and all(one.failure is not None for one in self.handles.values()):
                failures = {name: one.failure for name, one in self.handles.items()}
                reasons = [f"models ({name}): {failure}" for name, failure in failures.items()]
                problem, server.should_exit = ConfigError("\n".join(reasons)), True

        for task in keeping:
            task.add_done_callback(on_end)
        tell("deployed")
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again at its end
            signal.signal(number, lambda *_: None)
        await server.serve(_sockets(config.host, config.port))
        ending = self._keeping.values()
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, ingress.close(), return_exceptions=True)
        return problem

    # -- models that are added: the ingress's ModelHost ------------------------------------------

    def added_models(self) -> AddedModels:
        from serve_app.store.models import added_models

        return added_models(self._app.downloads)

    async def start(self, entry: Entry, model: ResolvedModel) -> LocalHandle:
        from serve_app.channel import routing_reports as reports
        from serve_app.config.schema import with_models

        options = with_models(self._app, [entry]).models[-1].serve
        handle = LocalHandle(model, self._folder, model.num_cpus, options)
        child = EngineChild(self._folder)
        self.handles[model.id], self._entries[model.id] = handle, entry
        self._keeping[model.id] = asyncio.create_task(handle.keep(child))
        assert reports.HERE.address is not None  # the ingress listens
        await handle.attach(reports.HERE.address)
        return handle

    async def stop(self, model_id: str) -> None:
        del self._entries[model_id]
        await self.handles.pop(model_id).quiet(_END_S)
        keeping = self._keeping.pop(model_id)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def _sockets(host: str, port: int) -> list[socket.socket] | None:
    """The sockets to listen on, where uvicorn would not listen to IPv4 and IPv6; else None."""
    if host != "::" or not socket.has_dualstack_ipv6():
        return None
    from serve_app.run.local.http import BACKLOG

    address, family = (host, port), socket.AF_INET6
    return [socket.create_server(address, family=family, dualstack_ipv6=True, backlog=BACKLOG)]


def _reserved_cpus(configured: ModelConfig, model: ResolvedModel) -> float:
    reserved = configured.serve.num_cpus
    return model.num_cpus if reserved is None else reserved


@contextmanager
def _own_folder() -> Iterator[Path]:
    """A private folder for what the processes share. Folders of servers that were killed are removed: no
    process has their lock."""
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{_FOLDER}*"):
        with suppress(OSError), (left / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
    try:
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / "lock")  # others see it with its lock only
            yield folder_for(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve(config: Path, content: Content, events: int | None) -> str | None:
    """Serve what a configuration file holds until a signal ends it. Returns why that cannot be done, if so.
    Raises ClusterNeededError."""
    if (why := why_proxies(content)) is not None:
        raise ClusterNeededError(why)
    args: dict[str, Any] = content["applications"][0].get("args") or {}
    http = content.get("http_options") or {}
    host, port = http.get("host") or "127.0.0.1", http.get("port") or 8000
    with ExitStack() as stack:
        folder = stack.enter_context(_own_folder())
        metrics.keep_in(folder / "metrics")
        stack.callback(os.environ.pop, metrics.FOLDER, None)  # Ray has metrics of its own
        shared_entries.keep_in(folder / "entries")
        children = [EngineChild(folder) for _ in args.get("models") or ()]
        for child in children:
            stack.callback(child.kill)
        from serve_app.config import schema
        from serve_app.run.ingress import settings_for
        from serve_app.run.resolving import resolve

        try:
            app = schema.parse(args, config)
            if app.data_at_rest is not True:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            logs.write_to_stderr(keeps_texts=app.data_at_rest is True)
            left_out: dict[str, str] = {}
            models = resolve(app, left_out=left_out, only_here=True)
            settings = settings_for(app, left_out)
            pairs = list(zip(app.models, children, strict=True))
            for model, child in pairs:
                if model.id in left_out:
                    child.kill()
            children = [child for model, child in pairs if model.id not in left_out]
            app = schema.without(app, left_out)
            _check_replicas(app, models)
            stack.enter_context(discoverable(port, f"{host}:{port}"))
            server = LocalServer(app, models, settings, folder)
            problem = uvloop.run(server.run(children, http, lambda kind: tell(events, kind)))
        except CorralError as error:
            return str(error)
        return None if problem is None else str(problem)


def main() -> None:
    """Serve until Ctrl-C or SIGTERM; exits with 1 if the models cannot be served."""
    args = arguments("serve_app.run.local.server", __doc__)
    allow_most_files()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    # Who started this may ignore it. Nobody could wait for processes then, and their ids would be others'.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        if args.events is not None:
            os.set_inheritable(args.events, False)
        problem = serve(
            args.config, content_of(args.config, host=args.host, port=args.port), args.events
        )
    except ClusterNeededError as error:
        print(f"Ray Serve runs this configuration: {error}.", file=sys.stderr, flush=True)
        if args.events is not None:
            os.set_inheritable(args.events, True)
        program = ["-P", "-m", "serve_app.cluster.one_machine", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, *program])
    if problem is not None:
        tell(args.events, "failed", problem)
        sys.exit(1)


if __name__ == "__main__":
    main()
