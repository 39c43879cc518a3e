"""Files and batches over HTTP, by a scripted engine and a real store."""

from __future__ import annotations

import asyncio
import codecs
import errno
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from fastapi import FastAPI

from serve_app.apis.batches import executor as executors
from serve_app.apis.batches import journal, preparation, routes
from serve_app.apis.batches import store as stores
from serve_app.apis.batches.journal import BatchJournal
from serve_app.apis.batches.objects import BatchRequest
from serve_app.apis.batches.store import BatchStore
from serve_app.base.errors import ConfigError, DecodeError, InvalidRequestError, QueueFullError
from serve_app.base.values.answers import Accepted, TokenDelta
from serve_app.base.values.requests import GenerationRequest, account
from serve_app.config.schema import BatchConfig, IngressConfig
from serve_app.server.http.request_context import Caller
from serve_app.server.model_registry import ServedModel
from serve_app.server.workers.pool import Workers
from serve_app.server.workers.wire import Piece
from tests.doubles.api import InProcess, build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine

URL = "http://127.0.0.1"
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}


def body(text: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def line(name: str, asked: Any = None, **fields: Any) -> dict[str, Any]:
    asked = body() if asked is None else asked
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": asked, **fields}


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


class CountingEngine(ScriptedEngine):
    """Counts how often a prompt was asked for, and may hold answers back, or refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.seen: list[GenerationRequest] = []
        self.held = asyncio.Event()
        self.held.set()
        self.refusals: list[Exception] = []
        self.n_running = self.most_running = 0
        self.seconds = 0.0
        """The time that an answer takes."""
        self.broken = ""
        """A prompt at which the engine breaks in an unforeseen way."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        self.seen.append(request)
        if self.refusals:
            raise self.refusals.pop()
        self.asked[bytes(request.prompt).decode()] += 1
        self.n_running += 1
        self.most_running = max(self.most_running, self.n_running)
        try:
            if request.background:
                await self.held.wait()
            await asyncio.sleep(self.seconds)
            if bytes(request.prompt).decode() == self.broken:
                raise RuntimeError("unforeseen")
            async for item in super().generate(request):
                yield item
        finally:
            self.n_running -= 1


class Server:
    """The API with a folder, and as many processes that work by it as a test likes."""

    def __init__(self, folder: Path, **access: Any) -> None:
        self.folder = folder
        self.engine = CountingEngine()
        model = ServedModel("m", N_CTX_SLOT, ByteTokenizer(), engine=self.engine)  # type: ignore[arg-type]
        self.models = {"m": model}
        self.store_folder = folder / "batches"
        batch = BatchConfig(folder=self.store_folder)
        self.access = IngressConfig(batch=batch, **access)
        self.workers: Workers | None = None
        self.lease_s = 1.0

    def api(self) -> FastAPI:
        api = build_api(self.models, self.access, self.workers)
        api.state.batches._lease_s = self.lease_s
        return api

    @asynccontextmanager
    async def process(self, key: str = "any") -> AsyncIterator[openai.AsyncOpenAI]:
        api = self.api()
        async with api.router.lifespan_context(api), self.client(api, key) as client:
            yield client

    @asynccontextmanager
    async def client(self, api: FastAPI, key: str = "any") -> AsyncIterator[openai.AsyncOpenAI]:
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        made: Any = httpx.AsyncClient(transport=transport, base_url=URL)
        async with made as http:
            yield openai.AsyncOpenAI(
                base_url=f"{URL}/v1", api_key=key, http_client=http, max_retries=0
            )


@pytest.fixture(autouse=True)
def _few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "MOST_AT_ONCE", 16)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(executors, "_LOOK_S", 0.05)
    monkeypatch.setattr(executors, "_MOST_PAUSE_S", 0.05)
    monkeypatch.setattr(executors, "_RENEW_S", 0.1)
    return Server(tmp_path)


async def upload(client: openai.AsyncOpenAI, lines: Sequence[object] | bytes) -> str:
    contents = lines if isinstance(lines, bytes) else jsonl(lines)
    return (await client.files.create(file=("in.jsonl", contents), purpose="batch")).id


async def begin(client: openai.AsyncOpenAI, lines: Sequence[object] | bytes, **asked: Any) -> str:
    asked = {"endpoint": CHAT, "completion_window": "24h"} | asked
    file_id = await upload(client, lines)
    return (await client.batches.create(input_file_id=file_id, **asked)).id


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(30):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return batch


async def contents(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    return [json.loads(one) for one in (await client.files.content(file_id)).text.splitlines()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_openais_own_client(server: Server) -> None:
    async with server.process() as client:
        lines = [line(f"q{i}", body(f"{i % 7} and {i}")) for i in range(100)]
        batch_id = await begin(client, lines, metadata={"for": "me"})
        batch = await ended(client, batch_id)
        assert batch.status == "completed"
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (100, 100, 0)
        assert batch.metadata == {"for": "me"}
        assert batch.error_file_id is None
        assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        assert batch.expires_at == pytest.approx(batch.created_at + 86400, abs=1)
        found = await contents(client, batch.output_file_id)
        assert [one["custom_id"] for one in found] == [f"q{i}" for i in range(100)]
        first = found[0]["response"]
        assert (first["status_code"], found[0]["error"]) == (200, None)
        assert first["body"]["choices"][0]["message"]["content"] == "Hello"
        assert set(server.engine.asked.values()) == {1}
        assert all(one.background for one in server.engine.seen)
        assert server.engine.most_running <= 16
        listed = [one.id async for one in client.batches.list(limit=1)]
        assert listed == [batch_id]
        names = {one.filename async for one in client.files.list(purpose="batch_output")}
        assert names == {f"{batch_id}_output.jsonl"}
    assert list((server.folder / "batches" / "runs").iterdir()) == []


async def test_a_process_that_ends_with_a_batch_leaves_no_journal(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends after the batch has got its status, and before the next line of code runs."""
    leaving, finish, close = threading.Event(), BatchStore.finish, executors.DiskRoom.close

    def finish_and_wait(*arguments: Any) -> None:
        finish(*arguments)
        assert leaving.wait(30)

    def close_and_tell(room: executors.DiskRoom) -> None:
        leaving.set()
        close(room)

    monkeypatch.setattr(BatchStore, "finish", finish_and_wait)
    monkeypatch.setattr(executors.DiskRoom, "close", close_and_tell)
    async with server.process() as client:
        batch = await ended(client, await begin(client, [line("q")]))
        assert batch.status == "completed"
    assert list((server.folder / "batches" / "runs").iterdir()) == []


async def test_lines_that_begin_alike_are_asked_together(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "MOST_AT_ONCE", 1)
    async with server.process() as client:
        lines = [line(str(i), body(f"{'ab'[i % 2]}{i:02}")) for i in range(20)]
        batch = await ended(client, await begin(client, lines))
        assert batch.status == "completed"
        asked = [bytes(one.prompt).decode() for one in server.engine.seen]
        assert sorted(asked[:10]) == sorted(asked)[:10]


async def test_lines_that_cannot_be_answered_are_in_a_file_of_their_own(server: Server) -> None:
    server.engine.refusals = [DecodeError("broken")] * 2
    async with server.process() as client:
        lines = [line("good"), line("bad", body(temperature=-1)), line("other", {"model": "x"})]
        batch = await ended(client, await begin(client, lines))
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
        (good,) = await contents(client, batch.output_file_id)
        assert good["custom_id"] == "good"
        bad, other = await contents(client, batch.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        assert other["custom_id"] == "other"


async def test_a_file_may_begin_with_a_byte_order_mark(server: Server) -> None:
    async with server.process() as client:
        lines = codecs.BOM_UTF8 + jsonl([line("a")])
        batch = await ended(client, await begin(client, lines))
        assert (batch.status, batch.request_counts.completed) == ("completed", 1)


async def test_a_full_server_is_asked_again(server: Server) -> None:
    server.engine.refusals = [QueueFullError("full", 1) for _ in range(20)]
    async with server.process() as client:
        batch = await ended(client, await begin(client, [line(str(i)) for i in range(5)]))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 0)
        assert len(server.engine.seen) == 25


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        pytest.param(b"", "empty_file", None, id="empty"),
        pytest.param(b"\n{\n", "invalid_json_line", 2, id="no JSON"),
        pytest.param(b"[]\n", "invalid_json_line", 1, id="no object"),
        pytest.param([line("a"), line("a")], "duplicate_custom_id", 2, id="twice"),
        pytest.param([line("")], "invalid_custom_id", 1, id="no id"),
        pytest.param([line("a", method="GET")], "invalid_method", 1, id="GET"),
        pytest.param([line("a", url="/v1/completions")], "mismatched_url", 1, id="another URL"),
        pytest.param([line("a", [])], "invalid_body", 1, id="no body"),
        pytest.param([line("a", body(stream=True))], "invalid_body", 1, id="a stream"),
        pytest.param([line(str(i)) for i in range(4)], "too_many_lines", 4, id="too many"),
    ],
)
async def test_a_wrong_file(
    tmp_path: Path,
    lines: Sequence[object] | bytes,
    code: str,
    number: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(tmp_path)
    monkeypatch.setattr(journal, "MOST_LINES", 3)
    async with server.process() as client:
        batch = await ended(client, await begin(client, lines))
        assert batch.status == "failed"
        (error,) = batch.errors.data
        assert (error.code, error.line) == (code, number)
        assert server.engine.seen == []


async def test_cancelling_keeps_what_there_is(server: Server) -> None:
    async with server.process() as client:
        server.engine.held.clear()
        batch_id = await begin(client, [line(f"q{i}") for i in range(400)])
        await until(lambda: server.engine.n_running == 8)
        server.engine.held.set()
        await until(lambda: server.engine.asked["user:Hi"] > 12)
        server.engine.held.clear()
        assert (await client.batches.cancel(batch_id)).status in ("cancelling", "cancelled")
        batch = await ended(client, batch_id)
        assert batch.status == "cancelled"
        counts = batch.request_counts
        assert (counts.total, counts.failed) == (400, 0)
        assert len(await contents(client, batch.output_file_id)) == counts.completed < 400
        assert server.engine.n_running == 0
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(batch_id)


async def test_lines_rise_before_their_window_runs_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others keep the engine busy, so that what yields gets nothing done."""
    monkeypatch.setattr(executors, "_PROMOTION_S", 0.05)
    server.engine.held.clear()
    async with server.process() as client:
        batch_id = await begin(client, [line(f"q{i}") for i in range(30)], completion_window="8s")
        batch = await ended(client, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts.completed == 30
    patient = [one for one in server.engine.seen if one.background]
    risen = [one for one in server.engine.seen if not one.background]
    assert {one.client for one in patient} == {""}
    assert {one.client for one in risen} == {account("", background=True)}
    assert len(risen) == 30


async def test_a_window_that_runs_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        executors, "_PROMOTION_S", 60.0
    )  # the lines wait behind everybody to the end
    async with server.process() as client:
        server.engine.held.clear()
        batch_id = await begin(client, [line(f"q{i}") for i in range(30)], completion_window="1s")
        batch = await ended(client, batch_id)
        assert batch.status == "expired"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (0, 30)
        errors = await contents(client, batch.error_file_id)
        assert [one["custom_id"] for one in errors] == [f"q{i}" for i in range(30)]
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert {one["response"] for one in errors} == {None}


async def test_another_process_goes_on_and_computes_only_what_was_not_written(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is gone as if it was killed: it releases nothing."""
    monkeypatch.setattr(BatchStore, "release", lambda *_, **__: None)
    names = [f"q{i}" for i in range(60)]
    async with server.process() as client:
        server.engine.held.clear()
        batch_id = await begin(client, [line(name, body(name)) for name in names])
        await until(lambda: server.engine.n_running == 8)
        server.engine.held.set()
        store = BatchStore(server.store_folder)
        await until(lambda: store.batch("", batch_id).request_counts.completed > 8)
        server.engine.held.clear()
    server.engine.held.set()
    n_before = store.batch("", batch_id).request_counts.completed
    assert 0 < n_before <= 60
    async with server.process() as client:
        batch = await ended(client, batch_id)
        assert batch.status == "completed"
        assert batch.request_counts.completed == 60
        found = await contents(client, batch.output_file_id)
    assert [one["custom_id"] for one in found] == names
    assert len({one["id"] for one in found}) == 60
    assert max(server.engine.asked.values()) <= 2
    assert sum(server.engine.asked.values()) <= 60 + 16


async def test_two_processes_do_not_work_on_one_batch(server: Server) -> None:
    server.lease_s = 60.0  # neither is so slow that the other takes its batch
    async with server.process() as client, server.process():
        lines = [line(f"q{i}", body(f"{i}")) for i in range(60)]
        batch_ids = [await begin(client, lines) for _ in range(3)]
        for batch_id in batch_ids:
            batch = await ended(client, batch_id)
            assert batch.request_counts.completed == 60
        assert set(server.engine.asked.values()) == {3}


KEYS = """
keys:
  - {name: a, key: aaaaaaaaaaaaaaaaaaaa, max_concurrent_requests: 1, tokens_per_minute: 10}
  - {name: b, key: bbbbbbbbbbbbbbbbbbbb}
"""


async def test_keys_see_their_own_only(tmp_path: Path) -> None:
    """And a batch is not held against what its key may use."""
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    server = Server(tmp_path, api_key_file=file)
    async with (
        server.process("a" * 20) as a,
        server.client(server.api(), "b" * 20) as b,
        server.client(server.api(), "c" * 20) as nobody,
    ):
        batch_id = await begin(a, [line(f"q{i}") for i in range(30)])
        batch = await ended(a, batch_id)
        assert batch.request_counts.completed == 30
        assert {one.client for one in server.engine.seen} == {"a"}
        assert len({one.cache_group for one in server.engine.seen}) == 1
        for ask in (
            lambda: b.batches.retrieve(batch_id),
            lambda: b.batches.cancel(batch_id),
            lambda: b.files.retrieve(batch.input_file_id),
            lambda: b.files.content(batch.output_file_id),
            lambda: b.files.delete(batch.output_file_id),
            lambda: begin_with(b, batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError) as raised:
                await ask()
            assert raised.value.code == "object_not_found"
        assert not [one async for one in b.files.list()]
        assert not [one async for one in b.batches.list()]
        with pytest.raises(openai.AuthenticationError):
            await nobody.files.list()


async def begin_with(client: openai.AsyncOpenAI, file_id: str) -> Any:
    return await client.batches.create(
        input_file_id=file_id, endpoint=CHAT, completion_window="24h"
    )


async def test_the_lines_of_a_key_are_for_its_models(tmp_path: Path) -> None:
    """No line reaches the engine of a model that the key may not use, whatever the line calls it."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": "a", "key": "a" * 20, "models": ["other"]}]}))
    server = Server(tmp_path, api_key_file=keys)
    async with server.process("a" * 20) as client:
        names = [{}, {"model": "m"}, {"model": "M:latest"}]
        lines = [line(f"q{i}", body("x") | named) for i, named in enumerate(names)]
        batch = await ended(client, await begin(client, lines))
        assert batch.request_counts.failed == len(names)
        results = await contents(client, batch.error_file_id)
        assert {one["response"]["status_code"] for one in results} == {403}
    assert server.engine.seen == []


async def test_no_other_user_can_read_the_files(server: Server) -> None:
    modes: dict[str, int] = {}

    def look() -> bool:
        for file in server.store_folder.rglob("*"):
            with suppress(FileNotFoundError):
                modes[str(file)] = file.stat().st_mode & 0o777
        return any("/runs/" in name for name in modes)

    umask = os.umask(0)
    try:
        async with server.process() as client:
            server.engine.held.clear()
            batch_id = await begin(client, [line("q", body("x"))])
            await until(look)
            server.engine.held.set()
            await ended(client, batch_id)
            look()
    finally:
        os.umask(umask)
    assert set(modes.values()) == {0o600, 0o700}
    assert {modes[name] for name in modes if "/files/" in name or ".sqlite" in name} == {0o600}


@pytest.mark.parametrize("damage", ["no database", "a damaged page", "a folder"])
def test_a_damaged_database_is_said_at_the_start(server: Server, damage: str) -> None:
    server.api()
    file = server.store_folder / "batches.sqlite"
    if damage == "a folder":
        file.unlink()
        file.mkdir()
    elif damage == "no database":
        file.write_bytes(bytes(range(256)) * 100)
    else:
        content = bytearray(file.read_bytes())
        content[4096:8192] = os.urandom(4096)
        file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        server.api()
    assert str(file) in refused.value.message
    assert "move batches.sqlite* away" in refused.value.message
    file.rename(server.store_folder / "away")
    server.api()


async def test_a_database_that_is_moved_away_while_serving_is_begun_anew(server: Server) -> None:
    async with server.process() as client:
        await upload(client, [line("q", body("x"))])
        (server.store_folder / "batches.sqlite").rename(server.store_folder / "away")
        assert (await client.files.list()).data == []
        batch = await ended(client, await begin(client, [line("q", body("x"))]))
        assert batch.status == "completed"


async def test_a_key_that_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    server = Server(tmp_path, api_key_file=file)
    async with server.client(server.api(), "a" * 20) as client:
        batch_id = await begin(client, [line("q")])
    file.write_text(KEYS.replace("name: a", "name: z"))
    async with server.process("b" * 20):
        store = BatchStore(server.store_folder)
        await until(lambda: store.batch("a", batch_id).status == "completed")
    assert store.batch("a", batch_id).request_counts.failed == 1
    assert server.engine.seen == []


async def test_files(server: Server) -> None:
    async with server.client(server.api()) as client:
        ids = [await upload(client, [line(str(i))]) for i in range(5)]
        assert [one.id async for one in client.files.list(limit=2)] == ids[::-1]
        assert [one.id async for one in client.files.list(limit=2, order="asc")] == ids
        assert (await client.files.content(ids[0])).content == jsonl([line("0")])
        found = await client.files.retrieve(ids[0])
        assert (found.bytes, found.filename) == (len(jsonl([line("0")])), "in.jsonl")
        await begin_with(client, ids[0])
        with pytest.raises(openai.BadRequestError):
            await client.files.delete(ids[0])
        assert (await client.files.delete(ids[1])).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(ids[1])
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=("x", b"x"), purpose="fine-tune")
    assert len(list((server.store_folder / "files").iterdir())) == 4
    assert not list(server.store_folder.glob("arriving-*"))


async def test_a_key_has_only_so_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, mib = Server(tmp_path), 1 << 20
    for user in (executors, routes):
        monkeypatch.setattr(user, "MOST_FILE_BYTES", 2 * mib)
    for name, most in (("MOST_FILES", 2), ("MOST_BYTES", 3 * mib), ("MOST_BATCHES", 1)):
        monkeypatch.setattr(stores, name, most)
    async with server.client(server.api()) as client:
        with pytest.raises(openai.APIStatusError) as large:
            await upload(client, b"x" * (2 * mib + 1))
        assert large.value.status_code == 413
        first = await upload(client, b"x" * 2 * mib)
        with pytest.raises(openai.RateLimitError):
            await upload(client, b"x" * (mib + 1))
        await upload(client, b"x")
        with pytest.raises(openai.RateLimitError):
            await upload(client, b"x")
        await begin_with(client, first)
        with pytest.raises(openai.RateLimitError):
            await begin_with(client, first)


async def test_files_that_expire(server: Server) -> None:
    now = 0.0
    store = BatchStore(server.folder / "own", clock=lambda: now)
    arrived = server.folder / "arrived"
    arrived.write_bytes(b"x")
    file = store.add_file("", arrived, "a", "batch", expires_s=3600)
    assert store.sweep() == 0
    now = 3601.0
    assert store.sweep() == 1
    assert not store.path(file.id).exists()


@pytest.mark.parametrize("seconds", ["3599", "2592001", "000003600" + "9" * 4000, "soon"])
async def test_files_expire_within_bounds(server: Server, seconds: str) -> None:
    transport = httpx.ASGITransport(server.api())
    form = {"purpose": "batch", "expires_after[seconds]": seconds}
    async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
        answer = await http.post("/v1/files", data=form, files={"file": ("a", b"{}")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_after")


async def test_without_a_folder() -> None:
    transport = httpx.ASGITransport(build_api({}))
    async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
        answer = await http.get("/v1/files")
        assert answer.status_code == 501
        assert "ingress.batch.folder" in answer.json()["error"]["message"]


def test_a_lease_is_one_holders(tmp_path: Path) -> None:
    now = 0.0
    store = BatchStore(tmp_path, clock=lambda: now)
    arrived = tmp_path / "arrived"
    arrived.write_bytes(b"x")
    file = store.add_file("", arrived, "a", "batch")
    asked = BatchRequest(input_file_id=file.id, endpoint=CHAT, completion_window="2d")
    batch = store.add_batch("", asked)
    assert batch.expires_at == 2 * 86400
    now = 1.0
    assert [one.id for one in store.claim("x", 10, 4, 4)] == [batch.id]
    assert store.claim("y", 10, 4, 4) == []
    now = 9.0
    assert store.renew("x", batch.id, 10) == "validating"
    now = 18.0
    assert store.claim("y", 10, 4, 4) == []
    now = 20.0
    assert [one.id for one in store.claim("y", 10, 4, 4)] == [batch.id]
    assert store.renew("x", batch.id, 10) is None, "it is another's"
    store.release("x", batch.id)
    assert store.renew("y", batch.id, 10) == "validating"


# -- what a file, a client or a disk can do ---------------------------------------------------------


NESTED = b'{"custom_id": "n", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n"
"""A line that is nested too deeply for readers of JSON."""


async def test_a_nested_line_fails_its_batch_and_holds_up_nobody(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    server = Server(tmp_path, api_key_file=file)
    async with server.process("b" * 20) as hostile, server.client(server.api(), "a" * 20) as honest:
        nested = [await begin(hostile, NESTED) for _ in range(8)]
        batch = await ended(honest, await begin(honest, [line("q")]))
        assert batch.request_counts.completed == 1
        for batch_id in nested:
            failed = await ended(hostile, batch_id)
            assert (failed.status, failed.errors.data[0].line) == ("failed", 1)
            assert (await hostile.files.delete(failed.input_file_id)).deleted


async def test_a_line_that_no_worker_can_check_is_wrong_and_the_others_are_not(
    server: Server,
) -> None:
    class FragileWorkers(InProcess):
        """Crash as WorkerPool does where a body ends its processes."""

        async def run(self, client: str, work: Any, *pieces: Piece, **options: Any) -> Any:
            if work is preparation.lines and b"poison" in b"".join(pieces):
                raise InvalidRequestError("This request cannot be read.")
            return await super().run(client, work, *pieces)

    server.workers = FragileWorkers(server.models)
    async with server.process() as client:
        lines = [line(str(n), body("poison" if n in (3, 17) else "Hi")) for n in range(20)]
        batch = await ended(client, await begin(client, lines))
        errors = [(error.code, error.line) for error in batch.errors.data]
        assert errors == [("invalid_line", 4), ("invalid_line", 18)]


async def test_a_request_that_the_application_fails_to_answer_is_one_lines_error(
    server: Server,
) -> None:
    server.engine.broken = "user:break"
    async with server.process() as client:
        lines = [line("good"), line("bad", body("break"))]
        batch = await ended(client, await begin(client, lines))
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (bad,) = await contents(client, batch.error_file_id)
        assert bad["response"]["status_code"] == 500


async def test_a_batch_that_cannot_be_worked_on_fails_after_some_attempts(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_BACK_OFF_S", 0.001)
    monkeypatch.setattr(stores, "MOST_ATTEMPTS", 3)
    attempts = []

    def broken(*arguments: Any) -> None:
        attempts.append(arguments)
        raise OSError("broken")

    monkeypatch.setattr(executors, "BatchJournal", broken)
    async with server.process() as client:
        batch = await ended(client, await begin(client, [line("q")]))
        assert (batch.status, batch.errors.data[0].code) == ("failed", "server_error")
        assert len(attempts) == 3


async def test_cancelling_and_deadlines_come_before_reading(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: object) -> None:
        raise AssertionError("the file was read")

    monkeypatch.setattr(BatchJournal, "next_chunk", unread)
    monkeypatch.setattr(BatchStore, "claim", lambda *_: [])
    async with server.process() as client:
        cancelled, late = [await begin(client, [line("q")]) for _ in range(2)]
        assert (await client.batches.cancel(cancelled)).status == "cancelled"
        monkeypatch.undo()
        monkeypatch.setattr(BatchJournal, "next_chunk", unread)
        with sqlite3.connect(server.store_folder / "batches.sqlite") as db:
            db.execute("UPDATE batches SET deadline = 0 WHERE id = ?", (late,))
        db.close()
        assert (await ended(client, late)).status == "expired"


async def test_a_keys_many_batches_do_not_delay_anothers_line(tmp_path: Path) -> None:
    """The engine has eight places, and those who have waited longest are answered first."""
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    server = Server(tmp_path, api_key_file=file)
    server.engine.seconds = 0.05
    async with server.process("b" * 20) as many, server.client(server.api(), "a" * 20) as single:
        lines = [line(str(n), body(str(n))) for n in range(100)]
        for _ in range(10):
            await begin(many, lines)
        await until(lambda: len(server.engine.seen) > 20)
        batch = await ended(single, await begin(single, [line("q")]))
        assert batch.request_counts.completed == 1
        assert len(server.engine.seen) < 500, "the others are not done"


async def test_promoted_lines_are_charged_to_their_key_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "_PROMOTION_S", 0.05)
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS.replace("max_concurrent_requests: 1, ", ""))
    server = Server(tmp_path, api_key_file=file)
    server.engine.held.clear()
    async with server.process("a" * 20) as client:
        batch_id = await begin(client, [line(f"q{i}") for i in range(30)], completion_window="6s")
        assert (await ended(client, batch_id)).status == "expired"
    promoted = [request for request in server.engine.seen if not request.background]
    assert 1 <= len(promoted) <= 3, "ten tokens a minute are two such prompts"


async def test_routes_that_are_switched_off_answer_no_lines(tmp_path: Path) -> None:
    server = Server(tmp_path, disabled_routes=(CHAT,))
    async with server.process() as client:
        batch = await ended(client, await begin(client, [line("q")]))
        (error,) = await contents(client, batch.error_file_id)
        assert error["response"]["status_code"] == 501
    assert server.engine.seen == []


async def test_slow_uploads_leave_room_for_others(server: Server) -> None:
    """Some of one client that send nothing, and another client's."""
    api = server.api()
    slow = [asyncio.create_task(stuck_upload(api, "10.0.0.1")) for _ in range(12)]
    await until(lambda: sum(task.done() for task in slow) == 8)
    assert [task.result() for task in slow if task.done()] == [429] * 8
    async with server.client(api) as client:
        assert await upload(client, [line("q")])
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert not list((server.store_folder / "arriving").iterdir())


async def stuck_upload(api: FastAPI, address: str) -> int:
    """Begin to upload a file, and send no more. The answer's status."""
    status = 0
    pieces = [b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n']

    async def receive() -> Any:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(), "more_body": True}
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": "/v1/files", "raw_path": b"/v1/files", "query_string": b"",
        "root_path": "", "headers": [(b"content-type", b"multipart/form-data; boundary=x")],
        "client": (address, 1), "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    await api(scope, receive, send)
    return status


async def test_lists_are_bounded(server: Server) -> None:
    async with server.client(server.api()) as client:
        with pytest.raises(openai.BadRequestError):
            await client.batches.list(limit=101)


async def test_errors_of_a_batch_stay_small(server: Server) -> None:
    """Each character of such a name takes ten as an error shows it."""
    name = "\U000e0001" * 512
    async with server.process() as client:
        batch = await ended(client, await begin(client, [line(name)] * 100))
        assert len(batch.errors.data) == 50
        assert len(batch.errors.model_dump_json()) < 64_000


def test_batches_and_strays_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "MOST_ENDED", 2)
    now = time.time()
    store = BatchStore(tmp_path, clock=lambda: now)
    (tmp_path / "arrived").write_bytes(b"x")
    file = store.add_file("", tmp_path / "arrived", "a", "batch")
    request = BatchRequest(input_file_id=file.id, endpoint=CHAT, completion_window="2d")
    ids = [store.add_batch("", request).id for _ in range(4)]
    for number, batch_id in enumerate(ids[:3]):
        now += number
        store.finish(batch_id, "completed", {}, (0, 0, 0))
    strays = [tmp_path / "arriving/x", tmp_path / "files/file-x", tmp_path / "runs/batch_x.sqlite"]
    kept = [tmp_path / "runs" / f"{ids[3]}.sqlite", store.path(file.id)]
    for path in (*strays, *kept):
        path.write_bytes(b"x")
        os.utime(path, (1, 1))
    fresh = tmp_path / "arriving/y"
    fresh.write_bytes(b"y")
    assert store.sweep() == 3
    assert [path.exists() for path in (*strays, *kept, fresh)] == [False] * 3 + [True] * 3
    assert {batch.id for batch in store.batches("", 10, None)} == set(ids[1:])
    now += 31 * 86400
    store.sweep()
    assert [batch.id for batch in store.batches("", 10, None)] == [ids[3]]


async def test_a_full_disk_pauses_batches_and_computes_nothing_twice(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executors, "_ROOM_S", 0.05)
    caplog.set_level("INFO", "corral.ingress")
    server = Server(small_disk)
    server.engine.seconds = 0.01
    async with server.process() as client:
        batch_id = await begin(client, [line(str(n), body(f"{n} is {n}")) for n in range(300)])
        await until(lambda: len(server.engine.seen) > 20)
        filler = small_disk / "filler"
        fill(filler)
        await until(lambda: "is full" in caplog.text)
        for _ in range(20):  # what is rolled back leaves room again
            await asyncio.sleep(0.05)
            fill(filler)
        n_asked = len(server.engine.seen)
        await asyncio.sleep(0.5)
        assert len(server.engine.seen) == n_asked, "nothing is asked for meanwhile"
        with pytest.raises(openai.APIStatusError) as refused:
            await upload(client, b"x" * 100_000)
        assert refused.value.status_code == 507
        filler.unlink()
        batch = await ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 300)
    assert set(server.engine.asked.values()) == {1}
    assert caplog.text.count("is full") == caplog.text.count("has room") > 0


def fill(path: Path) -> None:
    """Let a file grow until its disk has no room."""
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)


async def test_a_call_that_waits_for_room_is_cancelled_also_while_the_room_closes(
    tmp_path: Path,
) -> None:
    room, calls = executors.DiskRoom(tmp_path), []

    def write() -> None:
        calls.append("write")
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "no space")

    writing = asyncio.create_task(room.do(write))
    await until(lambda: not room._has_room.is_set())
    room.close()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert calls == ["write"]


async def test_an_answer_that_breaks_off_is_no_good_one() -> None:
    async def breaking(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"half', "more_body": True})
        raise ValueError("scripted")

    answer = await executors.post(breaking, "/v1/chat/completions", b"{}", Caller())
    assert answer.status_code == 500
