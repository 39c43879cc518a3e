"""The output of `corral serve`: bars on a terminal, lines elsewhere, and a summary when it serves."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from serve_app.base.progress import Stage
from serve_app.cli.client import WITHOUT_TEXT, Json, purpose

LITTLE_CONTEXT = 4096
"""Tokens of a slot below which chats soon run out of room."""


class Screen(AbstractContextManager["Screen"]):
    """Says each thing once. For one thread."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._bars: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._said: set[str] = set()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def step(self, name: str) -> None:
        """Shows the present step, of unknown length, in place of the one before."""
        if not self._console.is_terminal:
            self._say_once(f"{name} ...")
        elif "step" in self._bars:
            self._progress.update(self._bars["step"], description=name)
        else:
            self._bars["step"] = self._progress.add_task(name, total=None)

    def stage(self, model: str, stage: Stage) -> None:
        most = "" if stage.limit_s is None else f" (at most {stage.limit_s:.0f} s)"
        name = f"{model}: {stage.name}{most}"
        if not self._console.is_terminal:
            self._say_once(f"{name} ...")
            return
        if (bar := self._bars.get(model)) is None:
            bar = self._bars[model] = self._progress.add_task(name, total=1.0)
        began = self._began.setdefault(name, self._clock())
        done = stage.done
        if stage.limit_s:
            done = min(0.99, (self._clock() - began) / stage.limit_s)
        self._progress.update(bar, description=name, completed=done)

    def clear(self) -> None:
        for bar in self._bars.values():
            self._progress.remove_task(bar)
        self._bars.clear()

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.say(line)


@dataclass(slots=True)
class Served:
    host: str
    port: int
    key_file: Path | None
    allow_anonymous: bool
    log: Path
    ray_logs: str | None = None
    """The folder with Ray's own logs, if Ray runs."""

    @property
    def address(self) -> str:
        return f"http://{local_name(self.host)}:{self.port}"


def plain_table(*columns: str) -> Table:
    """A table of the terminal with these columns, without lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


def local_name(host: str) -> str:
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def summary(served: Served, models: Sequence[Json] | None, cards: Sequence[Json]) -> list[str]:
    """The last lines. `models` is from `/v1/stats`, None where the server refused to tell; `cards` is from
    `/v1/models`."""
    by_id = {card["id"]: card for card in cards}
    lines = [f"Address   {served.address}/v1"]
    is_open = served.key_file is not None or served.allow_anonymous
    if served.host in ("0.0.0.0", "::") and is_open:
        lines.append(
            f"          http://{socket.gethostname()}:{served.port}/v1 from other machines"
        )
    lines += [f"          {_who(served)}", f"Page      {served.address}/"]
    if models is None:
        lines.append("Model     All can answer. Set CORRAL_API_KEY to see them here.")
    for model in models or ():
        card = by_id.get(model["id"], {})
        if model["replicas"]:
            lines += _model_lines(model, card)
        else:
            reason = card.get("status", {}).get("reason")
            state = f"left out: {reason}" if reason else "starts when somebody asks for it"
            lines.append(f"Model     {model['id']}: {state}")
    lines.append(f"Logs      {_short_path(served.log)}")
    if served.ray_logs is not None:
        lines.append(f"          {served.ray_logs} (Ray's own)")
    lines.append("Ctrl-C stops it. In another terminal, try: corral chat, corral top")
    return lines


def _who(served: Served) -> str:
    if served.key_file is not None:
        return f"Clients need an API key of {_short_path(served.key_file)}."
    if served.allow_anonymous:
        return "Clients need no key. Everybody who reaches the address can use it."
    if served.host in ("0.0.0.0", "::"):
        return "Only for this machine. --api-key-file FILE opens it to others."
    return "Only for this machine. --host 0.0.0.0 --api-key-file FILE opens it to others."


def _model_lines(model: Json, card: Json) -> list[str]:
    replicas, n_ctx_train = model["replicas"], (card.get("meta") or {}).get("n_ctx_train")
    engine = replicas[0]["engine"]
    n_slots, n_ctx_slot, n_ctx = (engine[name] for name in ("n_slots", "n_ctx_slot", "n_ctx"))
    times = f"{len(replicas)} replicas, each " if len(replicas) > 1 else ""
    slots = f"{n_slots} slots that share" if n_slots > 1 else "1 slot of"
    what = f"{slots} {n_ctx:,} tokens"
    if does := WITHOUT_TEXT.get(purpose(card)):
        what = f"{does} texts of up to {n_ctx_slot:,} tokens"
    threads = engine["compute"]["threads"]
    lines = [f"Model     {model['id']}: {times}{what}, {threads} thread{'s' * (threads > 1)}"]
    lines += [f"          {reason}" for reason in replicas[0]["placement"].split("; ")]
    if does:
        return lines
    lines.append(
        f"          The longest request: {n_ctx_slot:,} tokens, prompt and answer together."
    )
    if n_ctx_train is not None and n_ctx_slot > n_ctx_train:
        lines.append(f"          Warning: the model was trained for {n_ctx_train:,} tokens only.")
    elif n_ctx_slot < LITTLE_CONTEXT:
        lines += [f"          {line}" for line in _little(n_slots, n_ctx_slot, n_ctx, n_ctx_train)]
    elif n_ctx_train is not None and n_ctx_slot < n_ctx_train:
        lines.append(f"          --context {n_ctx_train} allows longer requests, for more memory.")
    return lines


def _little(n_slots: int, n_ctx_slot: int, n_ctx: int, n_ctx_train: int | None) -> list[str]:
    """Why a request may have so few tokens, and what would allow more."""
    if n_ctx_train == n_ctx_slot:
        return [f"The model was trained for {n_ctx_slot:,} tokens, so a request has no more."]
    most = min(LITTLE_CONTEXT, n_ctx_train or LITTLE_CONTEXT)
    fewer = max(1, n_ctx // most)
    room = max(n_ctx_slot, n_ctx // fewer)
    warning = [
        f"Warning: long chats do not fit in {n_ctx_slot:,} tokens for prompt and answer together."
    ]
    if fewer < n_slots and room > n_ctx_slot:
        warning.append(f"--slots {fewer} --context {min(room, most)} takes the same memory.")
    warning.append(
        "engine.cache_type_k and engine.cache_type_v: q8_0 (in a --config FILE) hold nearly"
    )
    warning.append("twice as many tokens.")
    return warning


def _short_path(path: Path) -> str:
    """The path, with `~` for the home folder."""
    home = os.path.expanduser("~")  # noqa: PTH111
    text = str(path)
    return "~" + text.removeprefix(home) if text.startswith(home + "/") else text
