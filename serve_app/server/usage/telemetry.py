"""The telemetry of each request: spans of OpenTelemetry, and a line of JSON in the log.

Source: OpenTelemetry, "Semantic conventions for generative AI systems".
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_app import __version__
from serve_app.base.errors import ConfigError
from serve_app.base.values.answers import SequenceEnd
from serve_app.base.values.requests import GenerationRequest
from serve_app.server.http.request_context import Caller

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger("corral.ingress")
log = logging.getLogger("corral.requests")

MOST_LOGGED_BYTES = 64 * 2**10
"""The most of a body that a line of the log has."""

MOST_PATH_CHARS = 128
"""The most of a path that a span's name has: clients may ask at any path."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""The variables of the environment, of which one turns spans on."""
_HTTP = "opentelemetry.exporter.otlp.proto.http"
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/messages": "chat", "/api/chat": "chat"}
"""OpenTelemetry's names of what endpoints do; others complete texts."""


def provider(environment: Mapping[str, str] = os.environ) -> TracerProvider | None:
    """The provider that sends spans to where the environment says; None if it names no place. Then nothing
    is imported. Raises ConfigError if the exporter is not installed."""
    place = next(filter(None, map(environment.get, ENDPOINTS)), None)
    if place is None:
        return None
    file = Path(place.removeprefix("file://")) if place.startswith("file://") else None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporters: Any = file or importlib.import_module(f"{_HTTP}.trace_exporter")
    except ImportError:
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set. To send spans, install corral[otel]."
        ) from None
    name = environment.get("OTEL_SERVICE_NAME", "corral")
    resource = Resource.create({"service.name": name, "service.version": __version__})
    made = TracerProvider(resource=resource)
    exporter: Any = exporters.OTLPSpanExporter() if file is None else SpanFile(file)
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made


class SpanFile:
    """An exporter to a file: a line of OTLP's JSON for all spans that come together.

    Source: OpenTelemetry, "OpenTelemetry Protocol File Exporter"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch(0o600)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        entry = {
            "resource": {"attributes": _attributes(spans[0].resource.attributes)},
            "scopeSpans": [{"scope": {"name": "corral"}, "spans": [*map(_span_json, spans)]}],
        }
        with self._path.open("a") as file:
            file.write(json.dumps({"resourceSpans": [entry]}) + "\n")
        return SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True

    def shutdown(self) -> None: ...


def _span_json(span: ReadableSpan) -> dict[str, Any]:
    parent = {} if span.parent is None else {"parentSpanId": f"{span.parent.span_id:016x}"}
    return {
        "traceId": f"{span.context.trace_id:032x}",
        "spanId": f"{span.context.span_id:016x}",
        **parent,
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP's 0 is an unknown one
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value_json(value)} for name, value in values.items()]


def _value_json(value: Any) -> dict[str, Any]:
    if isinstance(value, tuple | list):
        return {"arrayValue": {"values": [*map(_value_json, value)]}}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": str(value)}


class Telemetry:
    """Observes the requests of one ingress. Used in its event loop."""

    def __init__(
        self, tracers: TracerProvider | None = None, *, answers: bool = False, bodies: bool = False
    ) -> None:
        """`answers`: the log has a line for each answer; `bodies`: with the body of its request."""
        if bodies:
            logger.warning("ingress.log_prompts: the log has what clients write.")
        self._tracers = tracers
        self.tracer: Tracer | None = tracers.get_tracer("corral") if tracers else None
        self.logs_answers, self.logs_bodies = answers, bodies

    def observe(
        self, caller: Caller, endpoint: str, headers: Mapping[str, str]
    ) -> ObservedRequest | None:
        """The observation of a request that begins; None if nobody wants one."""
        if self.tracer is None and not self.logs_answers:
            return None
        return ObservedRequest(self, caller, endpoint, headers)

    def close(self) -> None:
        """Send what is left. Blocking."""
        if self._tracers is not None:
            self._tracers.shutdown()


class ObservedRequest:
    """An HTTP request, from its first byte to its last. Its times grow though the clock is set back."""

    def __init__(
        self, telemetry: Telemetry, caller: Caller, endpoint: str, headers: Mapping[str, str]
    ) -> None:
        self._telemetry, self._caller, self._endpoint = telemetry, caller, endpoint
        self._began, self._monotonic = time.time_ns(), time.monotonic_ns()
        self._received = self._monotonic
        self._body: str | None = None
        self._answers: list[tuple[str, GenerationRequest, SequenceEnd, int]] = []
        self.span: Span | None = None
        self._status: int | None = None
        if telemetry.tracer is not None:
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            context = TraceContextTextMapPropagator().extract(dict(headers))
            name = f"POST {endpoint[:MOST_PATH_CHARS]}"
            self.span = telemetry.tracer.start_span(
                name, context, SpanKind.SERVER, start_time=self._began
            )

    def on_start(self, status: int) -> dict[str, str]:
        """Note the status of the answer. Returns the header that names the span, if there is one."""
        self._status = status
        if self.span is None:
            return {}
        context = self.span.get_span_context()
        ids = f"{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        return {"traceparent": f"00-{ids}"}

    def on_body(self, body: Sequence[bytes]) -> None:
        """Note that the body is here; it is empty if a route reads it by itself."""
        self._received = time.monotonic_ns()
        if self._telemetry.logs_bodies:
            self._body = b"".join(body)[:MOST_LOGGED_BYTES].decode(errors="replace")

    def on_answer(
        self, model: str, request: GenerationRequest, end: SequenceEnd, prepared: int
    ) -> None:
        """Note the end of an answer, whose request went to an engine at the time `prepared`, by
        `time.monotonic_ns`."""
        self._answers.append((model, request, end, prepared))
        if not self._telemetry.logs_answers:
            return
        caller, usage, timings = self._caller, end.usage, end.timings
        line = {
            "at": self._at(time.monotonic_ns()) / 1e9,
            "id": request.id,
            "request_id": caller.request_id,
            "key": caller.key_name or None,
            "endpoint": self._endpoint,
            "model": model,
            "finish_reason": end.reason.value,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "queue_s": round(timings.queue_s, 6),
            "first_token_s": round(timings.first_token_s, 6),
            "decode_s": round(timings.decode_s, 6),
            "compute_s": round(timings.compute_s, 6),
            "joules": timings.joules and round(timings.joules, 6),
            "failovers": timings.n_failovers,
        }
        if self._body is not None:
            line["body"] = self._body
        log.info("%s", json.dumps(line))

    def on_end(self) -> None:
        """Note that all was sent, or that the client has left. The span ends, with a child for each stage
        of the last answer. A response in the background goes on behind it."""
        if self.span is None:
            return
        now = time.monotonic_ns()
        if self._answers:
            self._add_stages(self.span, now)
            self.span.set_attributes(self._attributes())
        if self._status is not None:
            self.span.set_attribute("http.response.status_code", self._status)
        self.span.end(self._at(now))

    def _at(self, moment: int) -> int:
        """The nanoseconds since 1970 of a moment of `time.monotonic_ns`."""
        return self._began + moment - self._monotonic

    def _add_stages(self, parent: Span, now: int) -> None:
        """Each stage begins with the end of the one before. All are within the request."""
        from opentelemetry.trace import set_span_in_context

        _, _, end, prepared = self._answers[-1]
        timings = end.timings
        engine_s = [
            *(("failover", seconds) for seconds in timings.failovers_s),
            *(("queue", timings.queue_s), ("prefill", timings.prefill_s)),
            ("decode", timings.decode_s),
        ]
        stages, later = [("receive", self._received), ("prepare", prepared)], prepared
        for name, seconds in engine_s:
            later += int(seconds * 1e9)
            stages.append((name, later))
        assert self._telemetry.tracer is not None
        context, at = set_span_in_context(parent), self._monotonic
        for name, until in (*stages, ("send", now)):
            until = min(max(at, until), now)
            child = self._telemetry.tracer.start_span(name, context, start_time=self._at(at))
            child.end(self._at(until))
            at = until

    def _attributes(self) -> dict[str, Any]:
        """The counts of all answers; answers to one prompt count it once."""
        model, request, _, _ = self._answers[-1]
        ends = [end for _, _, end, _ in self._answers]
        prompts = {id(request.prompt): end.usage for _, request, end, _ in self._answers}.values()
        joules = [end.timings.joules for end in ends if end.timings.joules is not None]
        return {
            "gen_ai.operation.name": _OPERATIONS.get(self._endpoint, "text_completion"),
            "gen_ai.provider.name": "corral",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": request.id,
            "gen_ai.response.finish_reasons": [end.reason.value for end in ends],
            "gen_ai.usage.input_tokens": sum(usage.prompt_tokens for usage in prompts),
            "gen_ai.usage.output_tokens": sum(end.usage.completion_tokens for end in ends),
            "corral.cached_tokens": sum(usage.cached_tokens for usage in prompts),
            "corral.compute_s": sum(end.timings.compute_s for end in ends),
            **({"corral.joules": sum(joules)} if joules else {}),
            "corral.failovers": sum(end.timings.n_failovers for end in ends),
        }
