"""`corral serve`: starts a server for one machine, and says how far it is."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, NoReturn, cast

import yaml
from rich.console import Console

from serve_app.base import folders
from serve_app.base.errors import ConfigError
from serve_app.base.progress import Stage
from serve_app.cli import config_file, screen
from serve_app.cli.client import Client, Json, ServerError
from serve_app.cli.config_file import ServeOptions
from serve_app.cli.outlet import Outlet
from serve_app.cli.screen import Screen, Served
from serve_app.run import preflight
from serve_app.run.program import DRAIN_S

NOWHERE_ELSE: Mapping[str, str | int] = {}
_LOOK_EVERY_S, _CLOSE_S = 0.2, 2.0
_END_S = 60.0
"""The longest time that the server's processes have to end, when running answers have."""
_LOG_BYTES, _LOG_FILES = 10 * 2**20, 5
_REMOTE = {"repo", "repo_id", "url"}
"""Fields of a source that name something to download."""
_TOLD_LINES = 15
"""Lines of the log's end that are shown where the server ends without a word."""
STEPS = {
    "libraries": "Loading Ray's libraries",
    "ray": "Starting Ray",
    "serve": "Starting the server",
    "deployed": "Starting the model's processes",
}


class Stopped(Exception):  # noqa: N818
    """A signal asks this program to end."""


def run(
    options: ServeOptions,
    config: Path | None,
    console: Console,
    *,
    cluster: bool,
    verbose: bool,
    http: Mapping[str, str | int] = NOWHERE_ELSE,
) -> int:
    """Serve until Ctrl-C or SIGTERM; the exit status. `cluster` has Ray Serve do it, whatever the
    configuration asks for. `http` has a host or port instead of the file's. Raises ConfigError for what
    cannot be served."""
    if (reason := preflight.missing(with_ray=cluster)) is not None:
        raise ConfigError(reason)
    folder = Path(tempfile.mkdtemp(prefix="corral-run-"))
    file = console.file

    def write(text: str) -> None:
        file.write(text)
        file.flush()

    output = Outlet(write)
    if not console.is_terminal:
        console.file = cast(IO[str], output)
    try:
        if config is None:
            config = folder / "serve_config.yaml"
            config.write_text(config_file.text(config_file.document(options)))
        content = read_config(config)
        content["http_options"] = (content.get("http_options") or {}) | dict(http)
        _check_address(content)
        with _signals(), Screen(console) as shown:
            _download(content, shown)
            lines = output if verbose else None
            return _Server(config, content, http, shown, cluster=cluster, verbose=lines).run()
    except Stopped:
        return 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        output.close(_CLOSE_S)
        console.file = file
        if output.n_dropped:
            _forget_stdout()


def _forget_stdout() -> None:
    """Points stdout at nothing, as nobody reads it: else Python writes the rest at its end, and fails.
    Source: Python's documentation, "Note on SIGPIPE"."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_config(config: Path) -> Json:
    """A configuration file; its fields are the server's affair. Raises ConfigError."""
    try:
        content = yaml.safe_load(config.expanduser().read_text())
    except OSError as error:
        raise ConfigError(f"{config}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{config}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("applications"), list):
        raise ConfigError(f"{config}: applications[0].args is missing")
    return content


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C raise Stopped."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _address(content: Json) -> tuple[str, int]:
    http = content.get("http_options") or {}
    return str(http.get("host") or "127.0.0.1"), int(http.get("port") or 8000)


def _check_address(content: Json) -> None:
    """Raises ConfigError if another program listens where the server would, before anything is started."""
    host, port = _address(content)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"The address {host} is not this machine's: {error.strerror}.") from None
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            problem = f"The server cannot listen on port {port} of {host}: {error.strerror}."
            if error.errno == errno.EADDRINUSE:
                problem = (
                    f"Another program listens on port {port} of {host}. Stop it, or choose another port: "
                    f"`corral serve --port {port + 1}`, or `make serve PORT={port + 1}`."
                )
            raise ConfigError(problem) from None


def _args(content: Json) -> Json:
    (first, *_) = content["applications"] or [{}]
    args = first.get("args") if isinstance(first, dict) else None
    return args if isinstance(args, dict) else {}


def _download(content: Json, shown: Screen) -> None:
    """Models that are not here yet. Raises ConfigError."""
    for model in _args(content).get("models") or ():
        source = model.get("source") if isinstance(model, dict) else None
        if not isinstance(source, dict) or not _REMOTE & source.keys():
            continue
        from serve_app.config.sources import DownloadsConfig, ModelSource, ProjectorSource
        from serve_app.store.models import locate, pin_source, pinned_projector, projector_beside

        report, projector = partial(shown.stage, str(model.get("id"))), model.get("projector")
        try:
            known = ModelSource.model_validate(source)
            if isinstance(projector, dict):
                projector = ProjectorSource.model_validate(projector)
            downloads = DownloadsConfig.model_validate(_args(content).get("downloads") or {})
        except ValueError:
            continue  # the server says what is wrong with it
        locate(known, downloads, report)
        if projector:
            projector = pinned_projector(projector, downloads)
        elif projector is None:
            with suppress(ConfigError):  # the server says why it has none
                projector = projector_beside(pin_source(known, downloads), downloads)
        if projector:
            locate(projector, downloads, report)
    shown.clear()


class _Server:
    def __init__(
        self,
        config: Path,
        content: Json,
        http: Mapping[str, str | int],
        shown: Screen,
        *,
        cluster: bool,
        verbose: Outlet | None,
    ) -> None:
        """`verbose` gets the server's output, too, if it is to be shown."""
        self._shown, self._verbose = shown, verbose
        self._arguments = [str(config), *(f"--{name}={value}" for name, value in http.items())]
        self._module = "cluster.one_machine" if cluster else "run.local.server"
        ingress: Mapping[str, Any] = _args(content).get("ingress") or {}
        host, port = _address(content)
        key_file = ingress.get("api_key_file")
        drain_s = (ingress.get("serve") or {}).get("graceful_shutdown_timeout_s")
        self._end_s = _END_S + (DRAIN_S if drain_s is None else float(drain_s))
        self._served = Served(
            host=host,
            port=port,
            key_file=None if key_file is None else Path(str(key_file)).expanduser(),
            allow_anonymous=bool(ingress.get("allow_anonymous")),
            log=folders.cache_folder() / "logs" / f"server-{port}.log",
        )
        self._answers = self._is_deployed = self._is_refused = False
        self._problem: str | None = None

    def run(self) -> int:
        """Run the server until it ends, or until Stopped is raised. Returns the exit status."""
        reading, writing = os.pipe()
        program = ["-P", "-m", f"serve_app.{self._module}", *self._arguments]
        process = subprocess.Popen(
            [sys.executable, *program, "--events", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            start_new_session=True,  # Ctrl-C is for this process, which passes it on
        )
        os.close(writing)
        assert process.stdout is not None
        log = threading.Thread(target=self._keep_log, args=(process.stdout,), daemon=True)
        log.start()
        key = _any_key(self._served.key_file) or os.environ.get("CORRAL_API_KEY")
        self._client = Client(self._served.address, key, timeout_s=5)
        try:
            self._follow(process, reading)
            status = process.wait()
        except Stopped:
            self._shown.clear()
            self._shown.say("Stopping: running answers may end first ...")
            _end(process, self._end_s)
            return 0
        finally:
            _end(process, self._end_s)
            log.join(timeout=5)
        self._shown.clear()
        self._shown.say(self._problem or self._last_lines())
        self._shown.say(f"The server has ended. Its log: {self._served.log}")
        return status or 1

    def _follow(self, process: subprocess.Popen[bytes], events: int) -> None:
        """Tell how far the start is, until all models are served or the process has ended."""
        self._shown.step("Starting the server")
        queue = SimpleQueue[Json]()
        threading.Thread(target=_read_events, args=(events, queue), daemon=True).start()
        while process.poll() is None:
            with suppress(Empty):
                self._take(queue.get(timeout=_LOOK_EVERY_S))
            if self._is_deployed and self._look():
                return

    def _take(self, event: Json) -> None:
        kind, text = event["kind"], event["text"]
        self._is_deployed |= kind == "deployed"
        if kind == "failed":
            self._problem = _problem(text)
        elif kind == "logs":
            self._served.ray_logs = f"{text}/logs"
        elif kind in STEPS and not self._answers:
            self._shown.step(STEPS[kind])

    def _look(self) -> bool:
        """Ask the server. Returns whether it has said all."""
        try:
            if not self._answers:
                self._client.get("/livez")
                self._answers = True
                self._shown.say(f"{self._served.address} answers; models are still loading.")
                self._shown.step("Waiting for the models")
            models = [] if self._is_refused else self._client.get("/v1/stats")["models"]
            for model in models:
                for replica in model["fetching"]:
                    stage = Stage(replica["stage"], replica["done"], replica["limit_s"])
                    self._shown.stage(model["id"], stage)
            self._client.get("/health")  # raises until all can answer that do not wait for requests
            # By now, the server has the files open.
            cards = [] if self._is_refused else self._client.get("/v1/models")["data"]
        except ServerError as error:
            self._is_refused |= error.status in (401, 403)
            return False
        loaded = {card["id"] for card in cards if card["status"]["value"] == "loaded"}
        if any(model["id"] in loaded and not model["replicas"] for model in models):
            return False  # a replica was late
        self._shown.clear()
        for line in screen.summary(self._served, None if self._is_refused else models, cards):
            self._shown.say(line)
        return True

    def _keep_log(self, lines: IO[bytes]) -> None:
        """Writes the server's output to a file, which is begun anew when it is large. The output is read
        whatever becomes of it: the server would wait for that in the middle of its work."""
        handler = _LogFile(
            self._served.log,
            maxBytes=_LOG_BYTES,
            backupCount=_LOG_FILES,
            encoding="utf-8",
            delay=True,
        )

        def write(text: str) -> None:
            self._served.log.parent.mkdir(parents=True, exist_ok=True)
            handler.emit(logging.makeLogRecord({"msg": text}))

        outlets = [Outlet(write)] if self._verbose is None else [Outlet(write), self._verbose]
        for line in lines:
            for outlet in outlets:
                outlet.write(line.decode(errors="replace").rstrip("\n") + "\n")
        if n_dropped := sum(outlet.n_dropped for outlet in outlets):
            outlets[0].write(f"{n_dropped} lines could not be written.\n")
        outlets[0].close(_CLOSE_S)
        with suppress(OSError):
            handler.close()

    def _last_lines(self) -> str:
        with suppress(OSError):
            lines = self._served.log.read_text(errors="replace").splitlines()
            return "\n".join(lines[-_TOLD_LINES:])
        return ""


class _LogFile(RotatingFileHandler):
    """A log whose errors are raised, and not written to a terminal. Texts bring the ends of their lines."""

    terminator = ""

    def handleError(self, _: logging.LogRecord) -> NoReturn:  # noqa: N802
        """Raise the error that is being handled."""
        raise


def _read_events(descriptor: int, events: SimpleQueue[Json]) -> None:
    """Put each line of JSON from a pipe into the queue, until the pipe's writer is gone."""
    with os.fdopen(descriptor) as lines:
        for line in lines:
            events.put(json.loads(line))


def _end(process: subprocess.Popen[bytes], end_s: float) -> None:
    """SIGINT, also for a process that was stopped, and wait. A second Ctrl-C is passed on, too: answers end
    with an error. A third kills it, and so does the end of these seconds."""
    for _ in range(2):
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(end_s)
        except Stopped:
            continue
        except subprocess.TimeoutExpired:
            break
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _any_key(key_file: Path | None) -> str | None:
    """A key that may look at the server: an operator's, if there is one."""
    if key_file is None:
        return None
    try:
        keys = yaml.safe_load(key_file.read_text())["keys"]
        return str(sorted(keys, key=lambda key: not key.get("admin"))[0]["key"])
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError, AttributeError):
        return None  # the server says what is wrong with the file


def _problem(message: str) -> str:
    """Serve's messages about a failed start, without the tracebacks."""
    _, _, told = message.rpartition(" failed with exception:\n")
    lines = [line for line in told.splitlines() if line.strip()]
    for line in reversed(lines):
        _, found, rest = line.partition("ConfigError: ")
        if found:
            return rest
    return "\n".join(lines[-3:]) if lines else "The application could not be started."
