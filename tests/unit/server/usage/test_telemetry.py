"""Spans and log lines of requests."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format  # type: ignore[import-untyped]
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from serve_app.apis import api
from serve_app.base.errors import ConfigError
from serve_app.base.values.answers import FinishReason, SequenceEnd, Timings, TokenDelta, Usage
from serve_app.config.schema import IngressConfig
from serve_app.server.model_registry import ServedModel
from serve_app.server.usage import telemetry
from tests.doubles.api import build_api
from tests.unit.server.harness import N_CTX_SLOT, ByteTokenizer, ScriptedEngine, chat

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STAGES = ["receive", "prepare", "queue", "prefill", "decode", "send"]
ORDER = [*STAGES[:2], "failover", *STAGES[2:]]


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def client(
    engine: ScriptedEngine,
    tokenizer: ByteTokenizer,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., httpx.AsyncClient]:
    def made(*, traces: bool = True, **access: Any) -> httpx.AsyncClient:
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(spans))
        monkeypatch.setattr(api, "tracers", lambda: tracers if traces else None)
        models = {"m": ServedModel("m", N_CTX_SLOT, tokenizer, engine=engine)}  # type: ignore[arg-type]
        transport = httpx.ASGITransport(build_api(models, IngressConfig(**access)))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    return made


def end(**timings: Any) -> TokenDelta:
    times: dict[str, Any] = {"queue_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0} | timings
    return TokenDelta("", (2,), SequenceEnd(FinishReason.STOP, Usage(5, 2, 3), Timings(**times)))


def tree(spans: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The request's span, and its children in the order of their starts."""
    finished = spans.get_finished_spans()
    (parent,) = [span for span in finished if span.name.startswith("POST ")]
    children = [span for span in finished if span is not parent]
    assert {span.parent.span_id for span in children if span.parent} == {parent.context.span_id}
    return parent, sorted(children, key=lambda span: (span.start_time or 0, ORDER.index(span.name)))


@pytest.mark.parametrize("stream", [False, True])
async def test_spans_are_in_order_and_add_up_to_the_request(
    client: Callable[..., httpx.AsyncClient],
    engine: ScriptedEngine,
    spans: InMemorySpanExporter,
    stream: bool,
) -> None:
    engine.script = [TokenDelta("a", (1,)), end(queue_s=1e-4, prefill_s=2e-4, decode_s=1e-4)]
    async with client() as http:
        body = chat(stream=stream)
        answer = await http.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
    parent, children = tree(spans)
    assert [span.name for span in children] == STAGES
    assert children[0].start_time == parent.start_time
    assert [span.end_time for span in children[:-1]] == [span.start_time for span in children[1:]]
    assert children[-1].end_time == parent.end_time
    assert f"{parent.context.trace_id:032x}" == PARENT.split("-")[1]
    assert parent.parent is not None
    assert f"{parent.parent.span_id:016x}" == PARENT.split("-")[2]
    assert answer.headers["traceparent"].split("-")[1:3] == [
        PARENT.split("-")[1],
        f"{parent.context.span_id:016x}",
    ]
    attributes = dict(parent.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "m"
    assert attributes["gen_ai.usage.input_tokens"] == 5
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["http.response.status_code"] == 200


async def test_several_answers_have_their_sums_and_the_stages_of_the_last_one(
    client: Callable[..., httpx.AsyncClient], engine: ScriptedEngine, spans: InMemorySpanExporter
) -> None:
    engine.script = [end(decode_s=1e-4)]
    async with client() as http:
        await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    parent, children = tree(spans)
    assert [span.name for span in children] == STAGES
    attributes = dict(parent.attributes or {})
    assert attributes["gen_ai.usage.input_tokens"] == 10
    assert attributes["gen_ai.usage.output_tokens"] == 8
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",) * 4


async def test_spans_grow_though_the_clock_is_set_back(
    client: Callable[..., httpx.AsyncClient],
    engine: ScriptedEngine,
    spans: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([2_000_000_000 * 10**9])
    monkeypatch.setattr("time.time_ns", lambda: next(times, 10**9))
    engine.script = [end()]
    async with client() as http:
        await http.post("/v1/chat/completions", json=chat())
    _, children = tree(spans)
    assert all((span.start_time or 0) <= (span.end_time or 0) for span in children)


async def test_each_failover_has_a_span(
    client: Callable[..., httpx.AsyncClient], engine: ScriptedEngine, spans: InMemorySpanExporter
) -> None:
    engine.script = [end(failovers_s=(1e-5, 2e-5), n_failovers=2)]
    async with client() as http:
        await http.post("/v1/chat/completions", json=chat())
    _, children = tree(spans)
    assert [span.name for span in children] == [*STAGES[:2], "failover", "failover", *STAGES[2:]]
    lost = [(span.end_time or 0) - (span.start_time or 0) for span in children[2:4]]
    assert lost == [10_000, 20_000]


async def test_spans_stay_within_the_request_whatever_an_engine_says(
    client: Callable[..., httpx.AsyncClient], engine: ScriptedEngine, spans: InMemorySpanExporter
) -> None:
    engine.script = [end(queue_s=100.0, prefill_s=-5.0, decode_s=3.0)]
    async with client() as http:
        await http.post("/v1/chat/completions", json=chat())
    parent, children = tree(spans)
    assert all((span.start_time or 0) <= (span.end_time or 0) for span in children)
    assert max(span.end_time or 0 for span in children) == parent.end_time


@pytest.mark.parametrize("header", ["", "00-zz-11-01", "x" * 5000, f"{PARENT}-more", PARENT[1:]])
async def test_a_refusal_has_a_span_and_a_wrong_parent_is_none(
    client: Callable[..., httpx.AsyncClient], spans: InMemorySpanExporter, header: str
) -> None:
    async with client() as http:
        body = chat(temperature="hot")
        await http.post("/v1/chat/completions", json=body, headers={"traceparent": header})
    (span,) = spans.get_finished_spans()
    assert span.parent is None
    assert dict(span.attributes or {})["http.response.status_code"] == 400


async def test_a_client_that_leaves_ends_its_span(
    client: Callable[..., httpx.AsyncClient], engine: ScriptedEngine, spans: InMemorySpanExporter
) -> None:
    engine.script = [asyncio.Event()]
    async with client() as http:
        posting = asyncio.create_task(http.post("/v1/chat/completions", json=chat()))
        while not engine.requests:  # noqa: ASYNC110  # the engine tells nobody
            await asyncio.sleep(0)
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)
    assert [span.name for span in spans.get_finished_spans()] == ["POST /v1/chat/completions"]


async def test_a_response_in_the_background_goes_on_behind_its_span(
    client: Callable[..., httpx.AsyncClient],
    engine: ScriptedEngine,
    spans: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on = asyncio.Event()
    engine.script = [go_on, end()]
    async with client() as http:
        body = {"input": "Hi", "background": True}
        answer = (await http.post("/v1/responses", json=body)).json()
        go_on.set()
        async with http.stream("GET", f"/v1/responses/{answer['id']}?stream=true") as events:
            assert "response.completed" in "".join([text async for text in events.aiter_text()])
    assert [span.name for span in spans.get_finished_spans()] == ["POST /v1/responses"]
    assert "ended span" not in caplog.text


async def test_the_log_has_a_line_for_each_answer_without_its_texts(
    client: Callable[..., httpx.AsyncClient], caplog: pytest.LogCaptureFixture
) -> None:
    async with client(traces=False, request_log=True) as http:
        with caplog.at_level(logging.INFO, "corral.requests"):
            body = {"prompt": "a secret", "n": 2}
            await http.post("/v1/completions", json=body, headers={"x-request-id": "r1"})
    lines = [
        json.loads(one.getMessage()) for one in caplog.records if one.name == "corral.requests"
    ]
    assert len(lines) == 2
    assert lines[0]["request_id"] == "r1"
    assert lines[0]["model"] == "m"
    assert lines[0]["key"] is None
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"]) == (5, 2)
    assert "secret" not in caplog.text


async def test_the_log_has_what_clients_write_only_if_that_is_wanted(
    client: Callable[..., httpx.AsyncClient], caplog: pytest.LogCaptureFixture
) -> None:
    async with client(traces=False, request_log=True, log_prompts=True) as http:
        assert "the log has what clients write" in caplog.text
        with caplog.at_level(logging.INFO, "corral.requests"):
            await http.post("/v1/completions", json={"user": "u" * 100_000, "prompt": "x"})
            await http.post("/v1/completions", json={"prompt": "a secret"})
    first, second = (
        json.loads(one.getMessage()) for one in caplog.records if one.name == "corral.requests"
    )
    assert len(first["body"]) == telemetry.MOST_LOGGED_BYTES
    assert json.loads(second["body"]) == {"prompt": "a secret"}


def test_spans_go_to_a_file_as_lines_of_otlp(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    tracers = telemetry.provider({telemetry.ENDPOINTS[0]: f"file://{file}"})
    assert tracers is not None
    tracer = tracers.get_tracer("corral")
    values: dict[str, Any] = {"text": "a", "whole": 3, "part": 0.5, "is": True, "several": ("b",)}
    with tracer.start_as_current_span("parent", kind=SpanKind.SERVER, attributes=values):
        tracer.start_span("child").end()
    tracers.shutdown()
    (line,) = file.read_text().splitlines()
    (resource,) = json.loads(line)["resourceSpans"]
    names = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
    assert names["service.name"] == {"stringValue": "corral"}
    child, parent = resource["scopeSpans"][0]["spans"]
    assert (child["name"], child["parentSpanId"]) == ("child", parent["spanId"])
    assert child["traceId"] == parent["traceId"]
    assert len(bytes.fromhex(parent["traceId"])) == 16
    assert "parentSpanId" not in parent
    assert (child["kind"], parent["kind"]) == (1, 2)
    assert int(parent["startTimeUnixNano"]) <= int(child["startTimeUnixNano"])
    assert {one["key"]: one["value"] for one in parent["attributes"]} == {
        "text": {"stringValue": "a"},
        "whole": {"intValue": "3"},
        "part": {"doubleValue": 0.5},
        "is": {"boolValue": True},
        "several": {"arrayValue": {"values": [{"stringValue": "b"}]}},
    }
    assert file.stat().st_mode & 0o777 == 0o600
    # OTLP's own schema, which has ids in base64 where OTLP's JSON has them in hexadecimal
    for span in (child, parent):
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in span:
                span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    read = json_format.ParseDict({"resourceSpans": [resource]}, TracesData())
    assert [span.name for span in read.resource_spans[0].scope_spans[0].spans] == [
        "child",
        "parent",
    ]


def test_nothing_is_imported_or_told_unless_somebody_wants_it() -> None:
    program = (
        "import sys, tests.doubles.api as api\n"
        "from serve_app.server.usage.telemetry import Telemetry, provider\n"
        "assert provider({}) is None\n"
        "api.build_api({})\n"
        "assert Telemetry().observe(None, '', {}) is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk.trace')]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_the_exporter_the_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("opentelemetry.exporter.otlp", "opentelemetry.exporter.otlp.proto.http"):
        monkeypatch.setitem(sys.modules, f"{name}.trace_exporter", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto", None)
    with pytest.raises(ConfigError, match=r"install corral\[otel\]"):
        telemetry.provider({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"})
