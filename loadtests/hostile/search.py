"""A search for requests that cost other users time. Hypothesis draws bodies over all parameters.

    python -m loadtests.hostile.search [--minutes 30] [--seed N]

The parameters are those of the API's description. The routes and a real engine run in this process, over a
model of one layer and 151,936 tokens. Four costs of each request are measured: the longest CPU time on the
decoder thread beside decoding, for a token and for a step; the longest callback of the event loop; and the
growth of memory. A cost above its bar is measured three times more, and the least counts. Beside other
programs, the same work takes more CPU time. So these three times are divided by how much longer a fixed
piece of work takes than at its best. A finding is reported with the fields that it needs, beside the costs
of a calm request. The exit status is 1 if there is one. Workers read the bodies, as in a server, and have
bounds of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from hypothesis import HealthCheck, Phase, assume, given, seed, settings, target
from hypothesis import strategies as st

from loadtests.common.servers import exit_on_sigterm, free_port
from serve_app.apis.api import WORKER_MODULES, build_api
from serve_app.base.sampling import PARAMETERS
from serve_app.base.values.requests import GenerationRequest
from serve_app.cli.measure.benchmark import number_between, table
from serve_app.config.schema import IngressConfig
from serve_app.engine import Engine, EngineOptions
from serve_app.server.model_registry import ModelFile, ModelInfo
from serve_app.server.workers.pool import WorkerPool
from serve_app.server.workers.worker import MAX_BODY_BYTES
from tools.local_client import LocalClient
from tools.random_models.model import SHAPES, write_random_gguf

N_CTX_SLOT, LONG_PROMPT, N_SLOTS = 32_768, 30_000, 4
REQUEST_S = 60.0
PER_ROUND = 20
"""Requests that one search makes of one route."""
MOST_TOKENS, MOST_FIELDS, MANY = 12, 6, 2000
LARGE_BYTES, RARELY = 2**20, 16
"""The bytes of a large value, and how many values are drawn for a large one."""
CALM = {"prompt": "The quick brown fox", "max_tokens": MOST_TOKENS, "ignore_eos": True}
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """The costs of one request to others."""

    token_ms: float = 0.0
    """The decoder thread beside decoding, for a token, in a step that begins or ends no request."""
    step_ms: float = 0.0
    """The decoder thread beside decoding, in the longest step."""
    callback_ms: float = 0.0
    """The event loop's thread, in the longest callback."""
    memory_mib: float = 0.0
    """This process's growth."""

    def least(self, other: Cost) -> Cost:
        """The smaller of each."""
        return Cost(*map(min, astuple(self), astuple(other)))

    def at_best(self, slowdown: float) -> Cost:
        """The costs on a machine on which work takes so much less CPU time."""
        token, step, callback = self.token_ms, self.step_ms, self.callback_ms
        return Cost(token / slowdown, step / slowdown, callback / slowdown, self.memory_mib)

    @property
    def over(self) -> list[str]:
        """The names of the costs that are above their bars."""
        return [
            one.name for one in fields(self) if getattr(self, one.name) > getattr(BARS, one.name)
        ]


class Pace:
    """The time that a fixed piece of work takes, of the kind that samplers do."""

    def __init__(self) -> None:
        self._values = np.random.default_rng(1).random(150_000, np.float32)
        self._best_s = min(self._cpu_s() for _ in range(50))

    def _cpu_s(self) -> float:
        began = time.thread_time()
        np.argsort(self._values)
        return time.thread_time() - began

    def slowdown(self) -> float:
        """The present time of the work to its best; 1 at least."""
        now_s = sorted(self._cpu_s() for _ in range(5))[2]
        self._best_s = min(self._best_s, now_s)
        return now_s / self._best_s


BARS = Cost(token_ms=5, step_ms=50, callback_ms=50, memory_mib=80)


class Meter:
    """Measures the decoder thread and the event loop of a server in this process."""

    def __init__(self, engine: Engine) -> None:
        core = self._core = engine.core
        self._step, self._decode = core.step, core.backend.decode
        self._decode_s = self._token_s = self._step_s = self._callback_s = 0.0
        setattr(core, "step", self._timed_step)  # noqa: B010  # a method, for mypy
        setattr(core.backend, "decode", self._timed_decode)  # noqa: B010

    def _timed_decode(self, rows: Any) -> None:
        began = time.thread_time()
        try:
            self._decode(rows)
        finally:
            self._decode_s += time.thread_time() - began

    def _timed_step(self) -> None:
        core, self._decode_s = self._core, 0.0
        running, n_before, began = core.running, core.counts.generated_tokens, time.thread_time()
        self._step()
        own_s = time.thread_time() - began - self._decode_s
        self._step_s = max(self._step_s, own_s)
        n_tokens = core.counts.generated_tokens - n_before
        if n_tokens and running and core.running == running:
            self._token_s = max(self._token_s, own_s / n_tokens)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """In the event loop's thread: measure its callbacks."""
        run, thread, meter = asyncio.Handle._run, threading.get_ident(), self

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            if threading.get_ident() == thread:
                meter._callback_s = max(meter._callback_s, time.thread_time() - began)

        setattr(asyncio.Handle, "_run", timed)  # noqa: B010

    def of(self, ask: Callable[[], object]) -> Cost:
        """The costs of what `ask` asks for."""
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak begins anew
        self._token_s = self._step_s = self._callback_s = 0.0
        before = _status_mib("VmRSS")
        ask()
        token_ms, step_ms = 1e3 * self._token_s, 1e3 * self._step_s
        return Cost(token_ms, step_ms, 1e3 * self._callback_s, _status_mib("VmHWM") - before)


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class _Client(LocalClient):
    """A client that prepares requests in another thread, as replicas do."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._prepare = engine.prepare

    async def generate(self, request: GenerationRequest) -> Any:
        prepared = await asyncio.to_thread(self._prepare, request)
        async for delta in super().generate(request):
            yield delta
        del prepared


@dataclass(frozen=True, slots=True)
class Server:
    """The routes, and a real engine, in this process."""

    client: httpx.Client
    meter: Meter
    schemas: Mapping[str, Any]
    """JSON schemas by their names, from the API's description."""
    bodies: Mapping[str, Mapping[str, Any]]
    """The schemas of the fields of each route's bodies."""

    def cost(self, path: str, body: Body) -> Cost:
        """The costs of this request, whatever its answer."""
        sent = json.dumps(body).encode()

        def ask() -> None:
            headers = {"Content-Type": "application/json"}
            try:
                self.client.post(path, content=sent, headers=headers)
            except httpx.TimeoutException:
                print(f"{path} took more than {REQUEST_S:.0f} s", file=sys.stderr)

        return self.meter.of(ask)


@contextmanager
def served(path: Path) -> Iterator[Server]:
    """A server of the model at this path."""
    engine = Engine.load(
        path,
        EngineOptions(
            n_slots=N_SLOTS, n_ctx_slot=N_CTX_SLOT, threads=1, max_waiting=64, profile_limit_s=0
        ),
    )
    meter = Meter(engine)
    file = ModelFile("wide", N_CTX_SLOT, str(path))
    workers = WorkerPool([file], WORKER_MODULES)
    model = ModelInfo.open(file)
    api = build_api(
        {"wide": model.served_by(_Client(engine))}, IngressConfig(allow_anonymous=True), workers
    )
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(api, "127.0.0.1", port, loop="asyncio", log_level="error", lifespan="off")
    )

    async def run() -> None:
        meter.watch(asyncio.get_running_loop())
        await server.serve()
        await workers.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        described = api.openapi()
        schemas = described["components"]["schemas"]
        bodies = {
            route: _fields(described["paths"][route]["post"]["requestBody"], schemas)
            for route in NEEDED
        }
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_S) as client:
            yield Server(client, meter, schemas, bodies)
    finally:
        server.should_exit = True
        thread.join(10)
        engine.close(timeout_s=0)


def _fields(body: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = body["content"]["application/json"]["schema"]
    found: Mapping[str, Any] = schemas[schema["$ref"].rpartition("/")[2]]["properties"]
    return found


# -- drawn bodies ------------------------------------------------------------------------------

_UNITS = st.sampled_from(
    ["a", " ", "\n", "ab", "é", "中", "🦊", '"', "\\", "<|im_end|>", "{}", "the "]
)
_LENGTHS = st.sampled_from([1, 16, 250, 1000, 20_000])
TEXTS = st.builds(lambda unit, n: unit * max(1, n // len(unit)), _UNITS, _LENGTHS) | st.text(
    max_size=40
)
_GRAMMARS = [
    'root ::= "a"*',
    "root ::= [ ]*",
    "root ::= ([a-z]+ | [0-9]+ | root)*",
    'root ::= ("a" | "b" | "ab" | "ba"){0,200}',
    "root ::= [^x]*",
    'root ::= "x"? root | "y"',
]
_REGEXES = [
    ".*",
    "(a|b|ab)*",
    "[^\\n]{0,500}",
    "(a{1,30}){1,30}",
    " *",
    "(the |a |of )*",
    "(.*a){8}",
]
_SCHEMAS: list[Any] = [
    {},
    {"type": "string", "maxLength": 400},
    {"type": "array", "items": {"type": "integer"}, "minItems": 20},
    {"enum": [f"choice {number}" for number in range(2000)]},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(64)}},
    {"type": "string", "pattern": "^(a|b)*c[^d]{3,90}$"},
]
_FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
_MANY_IDS = [number % 5000 + 300 for number in range(LONG_PROMPT)]
_PATTERNS = st.sampled_from(["a", "[a-z]", "a.*b", "(a|b)c", "x{3}", ".", "\\d+"]) | TEXTS
OWN: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXTS | st.sampled_from([_MANY_IDS, _MANY_IDS[:1000], [7] * LONG_PROMPT, ["a"] * 32]),
    "messages": st.lists(
        st.builds(
            lambda role, text: {"role": role, "content": text},
            st.sampled_from(["user", "assistant"]),
            TEXTS,
        ),
        min_size=1,
        max_size=4,
    ),
    "input": TEXTS,
    "grammar": st.sampled_from(_GRAMMARS),
    "regex": st.sampled_from(_REGEXES) | _PATTERNS,
    "guided_regex": st.sampled_from(_REGEXES),
    "json_schema": st.sampled_from(_SCHEMAS),
    "format": st.sampled_from(["json", *_SCHEMAS]),
    "response_format": st.sampled_from(_SCHEMAS).map(
        lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    ),
    "tools": st.sampled_from([[{"type": "function", "function": _FUNCTION}], [_FUNCTION]]),
    "logit_bias": st.sampled_from([1, 100, 150_000]).map(
        lambda n: {str(token): token % 9 - 4 for token in range(n)}
    ),
    "stop": st.integers(1, 256).flatmap(
        lambda n: st.lists(TEXTS.map(lambda text: text[:1000]), min_size=n % 8, max_size=n)
    ),
    "grammar_triggers": st.lists(
        st.builds(
            lambda kind, text: {"type": kind, "value": text[:1000] or "a"},
            st.integers(1, 2),
            _PATTERNS,
        ),
        min_size=1,
        max_size=64,
    ),
    "samplers": st.lists(
        st.sampled_from(
            [
                "penalties",
                "dry",
                "top_n_sigma",
                "top_k",
                "typ_p",
                "top_p",
                "min_p",
                "xtc",
                "temperature",
                "infill",
                "adaptive_p",
            ]
        ),
        max_size=11,
    ),
}
"""Strategies of fields whose schemas say too little."""
LEFT_OUT = frozenset(
    {
        "model",
        "user",
        "sse_ping_interval",
        "id_slot",
        "lora",
        "cache_salt",
        "keep_alive",
        "images",
        "context",
        "background",
        "n_predict",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
    }
)
"""Fields that choose who is asked, or how long an answer is."""
NEEDED: Mapping[str, tuple[str, str | None]] = {
    "/completion": ("prompt", "max_tokens"),
    "/infill": ("input_prefix", "max_tokens"),
    "/tokenize": ("content", None),
    "/apply-template": ("messages", None),
    "/v1/completions": ("prompt", "max_tokens"),
    "/v1/chat/completions": ("messages", "max_tokens"),
    "/v1/messages": ("messages", "max_tokens"),
    "/v1/messages/count_tokens": ("messages", None),
    "/v1/responses": ("input", "max_output_tokens"),
    "/v1/responses/input_tokens": ("input", None),
    "/api/chat": ("messages", "options"),
    "/api/generate": ("prompt", "options"),
}
"""The routes that are searched, with the field that a request needs, and the one that bounds its answer."""


def least(path: str, text: Any, most: int) -> Body:
    """A request with what it needs alone: a text, and the most tokens of its answer."""
    name, limit = NEEDED[path]
    bound: Any = {"num_predict": most} if limit == "options" else most
    return {name: text} | ({} if limit is None else {limit: bound})


def _values(
    schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int = 0
) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows: usual ones, and its bounds."""
    again = partial(_values, schemas=schemas, depth=depth + 1)
    if "$ref" in schema:
        return again(schemas[schema["$ref"].rpartition("/")[2]])
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return st.one_of([again(one) for one in schema[choice]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer" | "number" as kind:
            low, high = (
                schema.get(name, default)
                for name, default in (("minimum", -2), ("maximum", 2**31 - 1))
            )
            usual = st.sampled_from([low, high, min(high, max(low, 1)), min(high, 40)])
            return usual | (st.integers(low, high) if kind == "integer" else st.floats(low, high))
        case "string":
            most = min(schema.get("maxLength", LARGE_BYTES), LARGE_BYTES)
            texts = TEXTS.map(lambda text: text[: schema.get("maxLength", 20_000)])
            return _rarely(st.just("a " * (most // 2)), texts)
        case "array" if depth < 4:
            items, most = again(schema.get("items", {})), schema.get("maxItems", LARGE_BYTES)
            usual = st.lists(items, max_size=3) | items.map(lambda one: [one] * min(most, MANY))
            return _rarely(items.map(lambda one: [one] * _many(one, most)), usual)
        case "object" if depth < 4:
            inner = {name: again(one) for name, one in schema.get("properties", {}).items()}
            needed = {name: inner[name] for name in schema.get("required", ()) if name in inner}
            optional = {name: one for name, one in inner.items() if name not in needed}
            usual = st.fixed_dictionaries(needed, optional=dict(list(optional.items())[:4]))
            if not schema.get("additionalProperties"):
                return usual
            return _rarely(st.just({f"{n}": "a" for n in range(LARGE_BYTES // 12)}), usual)
    return st.none() | st.integers() | TEXTS


def _rarely(large: st.SearchStrategy[Any], usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(1, RARELY).flatmap(lambda n: large if n == RARELY else usual)


def _many(value: object, most: int) -> int:
    """How often the value is in a list of LARGE_BYTES, if `most` allows that."""
    return max(1, min(most, LARGE_BYTES // (len(json.dumps(value)) + 2)))


@st.composite
def drawn(draw: st.DrawFn, server: Server, path: str) -> Body:
    """A body for this route: what it needs, and some other fields."""
    of_route = server.bodies[path]
    text = OWN.get(NEEDED[path][0], TEXTS)
    body = least(path, draw(text), draw(st.sampled_from([1, MOST_TOKENS])))
    others = of_route.keys() - LEFT_OUT - body.keys()
    sampling = others & {one.name for one in PARAMETERS} | others & OWN.keys()
    names = st.sampled_from(sorted(others)) | st.sampled_from(sorted(sampling or others))
    for name in draw(st.lists(names, max_size=MOST_FIELDS, unique=True)):
        body[name] = draw(OWN[name] if name in OWN else _values(of_route[name], server.schemas))
    if "ignore_eos" in of_route:
        body["ignore_eos"] = draw(st.booleans())
    if body.get("grammar_triggers"):
        body |= {"grammar_lazy": True, "grammar": "root ::= [a-z]+"}
    assume(len(json.dumps(body)) < MAX_BODY_BYTES)
    return body


# -- the search --------------------------------------------------------------------------------


@dataclass
class Search:
    """Looks for requests above the bars until it is too late."""

    server: Server
    until: float
    findings: dict[tuple[str, ...], tuple[Body, Cost]] = field(default_factory=dict)
    """By route and fields."""
    worst: dict[str, tuple[Cost, str, Body]] = field(default_factory=dict)
    """By kind of cost, the request that had most of it, with its route."""
    n_requests: int = 0
    pace: Pace = field(default_factory=Pace)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def run(self, first_seed: int) -> None:
        """Search each route in turn."""
        number = first_seed
        while True:
            for path in NEEDED:
                if self.is_over:
                    return
                number += 1
                self._round(path, number)

    def _round(self, path: str, number: int) -> None:
        @seed(number)
        @settings(
            max_examples=PER_ROUND,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.target],
            suppress_health_check=list(HealthCheck),
        )
        @given(drawn(self.server, path))
        def look(body: Body) -> None:
            if not self.is_over:
                cost = self._look(path, body)
                for one in fields(cost):
                    target(getattr(cost, one.name), label=one.name)

        look()

    def _look(self, path: str, body: Body) -> Cost:
        self.n_requests += 1
        cost = self.server.cost(path, body)
        if cost.over:
            cost = self._surely(path, body)
        for kind in (one.name for one in fields(cost)):
            if kind not in self.worst or getattr(cost, kind) > getattr(self.worst[kind][0], kind):
                self.worst[kind] = cost, path, body
        if cost.over and not self._is_known(path, body):
            needed, cost = self._smallest(path, body, cost)
            self.findings[(path, *sorted(needed))] = needed, cost
            print(_told(path, needed, cost), file=sys.stderr, flush=True)
        return cost

    def _surely(self, path: str, body: Body) -> Cost:
        """The least of three more times, at the machine's best pace: others use it, too."""
        costs = []
        for _ in range(3):
            cost, slowdown = self.server.cost(path, body), self.pace.slowdown()
            costs.append(cost.at_best(slowdown))
        return costs[0].least(costs[1]).least(costs[2])

    def _is_known(self, path: str, body: Body) -> bool:
        return any(route == path and body.keys() >= set(names) for route, *names in self.findings)

    def _smallest(self, path: str, body: Body, cost: Cost) -> tuple[Body, Cost]:
        """The fields without which the first cost that is above its bar is not, and the cost with them."""
        name = cost.over[0]
        for one in sorted(body.keys() - {*NEEDED[path]}):
            less = {key: value for key, value in body.items() if key != one}
            without = self._surely(path, less)
            if name in without.over:
                body, cost = less, without
        return body, cost


def _told(path: str, body: Body, cost: Cost) -> str:
    def short(value: object) -> str:
        text = json.dumps(value)
        return text if len(text) < 90 else f"{text[:60]}... ({len(text)} characters)"

    said = ", ".join(f"{name}: {short(value)}" for name, value in sorted(body.items()))
    return f"{', '.join(cost.over) or 'nothing'} at {path}: {said}\n  {cost}"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.hostile.search", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=number_between(0, 2**32), default=random.randrange(2**32))
    args = parser.parse_args(argv)
    gguf = Path.home() / ".cache/corral/hostile/wide.gguf"
    if not gguf.is_file():
        gguf.parent.mkdir(parents=True, exist_ok=True)
        write_random_gguf(gguf, SHAPES["wide"], "q8_0")
    with served(gguf) as server:
        gc.collect()
        gc.freeze()  # pauses of the collector are no request's fault
        for route, (name, _) in NEEDED.items():  # what is made once is no request's fault
            text: Any = [{"role": "user", "content": "a"}] if name == "messages" else "a"
            server.cost(route, least(route, text, 1))
        calm = [server.cost("/v1/completions", CALM) for _ in range(5)]
        search = Search(server, time.monotonic() + 60 * args.minutes)
        search.run(args.seed)
    rows = [("a calm request", calm[-1])]
    rows += [(f"most {kind}, {path}", cost) for kind, (cost, path, _) in search.worst.items()]
    columns = ("request", *(one.name for one in fields(Cost)))
    print(table(columns, [(name, *(f"{x:.1f}" for x in astuple(cost))) for name, cost in rows]))
    for kind, (cost, path, body) in search.worst.items():
        print(f"most {kind}: {_told(path, body, cost)}")
    print(f"\n{search.n_requests} requests, seed {args.seed}, {len(search.findings)} findings.")
    for (route, *_), (body, cost) in search.findings.items():
        print(_told(route, body, cost))
    return int(bool(search.findings))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
