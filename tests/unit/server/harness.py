"""The API over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from serve_app.base.errors import CorralError, InvalidRequestError
from serve_app.base.values.answers import (
    Accepted,
    FinishReason,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)
from serve_app.base.values.media import Medium, Size
from serve_app.base.values.replicas import FetchingReplica, ReplicaStats, RequestRecord, SlotAction
from serve_app.base.values.requests import GenerationRequest
from serve_app.config.sources import AdapterConfig
from serve_app.engine.metrics.stats import (
    EmbeddingStats,
    EngineStats,
    QueueStats,
    RequestStats,
    SpeculationStats,
    TimingStats,
    TokenStats,
)
from serve_app.prompt.conversation import Conversation, Turn
from serve_app.prompt.output_parser import THINK
from serve_app.prompt.template_caps import TemplateCaps
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.prompt.tool_calls import ToolFormat
from serve_app.server.model_registry import Answers
from tests.doubles.backend import FakeVocabulary
from tests.unit.prompt.tool_calls.formats import FORMAT

N_CTX_SLOT = 64
END = SequenceEnd(FinishReason.STOP, Usage(5, 2, 3), Timings(0, 0, 0))
HELLO = [TokenDelta("Hel", (1,)), TokenDelta("", (2,)), TokenDelta("lo", (3,), END)]


def said(turn: Turn) -> str:
    called = [f"{call.name}{call.value}" for call in turn.calls]
    reasoning = f"({turn.reasoning})" if turn.reasoning else ""
    return "".join([reasoning, turn.text, *called])


def takes(grammar: str, text: str) -> bool:
    """Whether the grammar takes the text, and the text may end there."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    encoded = list(text.encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


class ByteModelFile:
    """What a model's file says."""

    path = Path(__file__)
    n_vocab = FakeVocabulary.n_vocab
    n_embd = 3
    vocab_type, n_ctx_train = 2, 2048
    n_bytes, n_params, file_type = 1_500_000, 1_520_000_000, "Q4_K - Medium"
    eog_tokens = (256,)
    pooling: str | None = None
    is_causal = True
    has_softmax = False

    def metadata(self) -> dict[str, str]:
        return {
            "general.architecture": "bytes",
            "general.file_type": "15",
            "general.license": "mit",
            "general.version": "2.5",
            "bytes.context_length": "32768",
            "bytes.rope.freq_base": "10000.000000",
            "tokenizer.ggml.add_bos_token": "false",
            "tokenizer.chat_template": "{{ messages }}",
        }

    def fingerprint(self) -> bytes:
        return bytes(range(32))


class ByteTokenizer:
    """One token for each byte; a chat is its contents joined."""

    template_caps = TemplateCaps(tools=True)
    pooling = "mean"
    reranks = False
    labels: tuple[str, ...] = ()
    tool_format: ToolFormat = FORMAT["hermes"]
    thinks = False
    reasoning_tags = THINK
    output_parser = Tokenizer.output_parser
    is_reasoning = Tokenizer.is_reasoning
    dialect = Tokenizer.dialect
    reasoning_budget = Tokenizer.reasoning_budget
    can_infill = True

    def __init__(self) -> None:
        self.model = ByteModelFile()

    @property
    def has_classifier(self) -> bool:
        return self.reranks or bool(self.labels)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    encode_for_embedding = encode

    def least_tokens(self, n_chars: int) -> int:
        return n_chars // 4

    chat_template = "{{ messages }}"
    bos, eos = "<s>", "</s>"

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        return tuple((b"^" if add_special else b"") + text.encode())

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else b"</s>" if special else b""

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        pieces = (self.piece(token, special=special) for token in tokens)
        return b"".join(pieces).decode(errors="replace")

    def render_chat(self, *args: Any, **options: Any) -> str:
        return bytes(self.encode_chat(*args, **options)).decode()

    def delimiter_token(self, text: str) -> int | None:
        return None

    def encode_infill(self, before: str, after: str, prompt: str = "") -> tuple[int, ...]:
        return self.encode(f"<{before}{prompt}|{after}>")

    def encode_infill_files(self, files: list[tuple[str, str]]) -> tuple[int, ...]:
        return self.encode("".join(f"[{name}:{text}]" for name, text in files))

    encode_pair = Tokenizer.encode_pair

    def _plain(self, text: str) -> list[int]:
        return list(text.encode())

    def _encode_pair(
        self, query: str | Sequence[int], document: str | Sequence[int]
    ) -> tuple[int, ...]:
        """The texts with a template's `|` between them."""
        asked, told = (
            one if isinstance(one, str) else self.decode(one) for one in (query, document)
        )
        return self.encode(f"{asked}|{told}")

    def encode_chat(
        self,
        conversation: Conversation,
        tools: list[dict[str, Any]],
        extra: dict[str, Any] | None = None,
        thinks: bool = True,
        *,
        add_generation_prompt: bool = True,
        begun: Turn | None = None,
    ) -> tuple[int, ...]:
        if conversation and conversation[0].text == "refuse":
            raise InvalidRequestError("The template refuses.", "messages")
        names = "".join(f"[{tool['function']['name']}]" for tool in tools)
        ending = (
            "".join(v for v in (extra or {}).values() if isinstance(v, str))
            if thinks and begun is None
            else "|no reasoning"
        )
        turns = "|".join(f"{turn.role}:{said(turn)}" for turn in conversation)
        return self.encode(names + turns + ending + ("\n\n".join(begun.texts) if begun else ""))


Script = Sequence[TokenDelta | Exception | asyncio.Event]
"""What an engine does, in turn; it waits for events."""

STATS = asdict(
    EngineStats(
        n_slots=3,
        n_ctx_slot=100,
        n_ctx=200,
        queue=QueueStats(running=2, waiting=2),
        requests=RequestStats(prefill_s=0.5, generation_s=2),
        tokens=TokenStats(2, 2, generated_tokens=2, n_tokens_max=50),
        timing=TimingStats(batches=2, busy_slots=2),
        speculation=SpeculationStats(2, 2, 2),
        embeddings=EmbeddingStats(embedded_tokens=2, embedding_batches=2),
    )
)


class ScriptedEngine:
    """Yields a script, exceptions in it raised, and remembers what it was asked. A request is accepted
    unless its script begins with an exception."""

    def __init__(self) -> None:
        self.script: Script = list(HELLO)
        self.scripts: list[Script] = []
        """What the next requests get instead."""
        self.requests: list[GenerationRequest] = []
        self.accepted = Accepted()
        self.slot_actions: list[tuple[str, str, int, str]] = []
        self.records: list[RequestRecord] = []
        self.adapters: list[AdapterConfig] = []
        """Those that were loaded."""
        self.texts: list[tuple[tuple[int, ...], ...]] = []
        self.media: list[Medium] = []
        self.vectors: NDArray[np.float32] | None = None
        self.clients: list[str] = []
        """Whose texts they were."""
        self.refusal: Exception | None = None
        """What `embed` raises."""
        self.left_early = False
        self.busy = False
        self.n_replicas = 1
        self.is_loaded = True
        self.missing: tuple[str, ...] = ()
        """Replicas that do not answer."""
        self.fetching_replicas: tuple[FetchingReplica, ...] = ()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        self.requests.append(request)
        script = self.scripts.pop(0) if self.scripts else self.script
        try:
            if not isinstance(script[0], Exception):
                yield self.accepted
            for item in script:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, asyncio.Event):
                    await item.wait()
                else:
                    yield item
        except (GeneratorExit, asyncio.CancelledError):
            self.left_early = True
            raise

    async def media_tokens(self, sizes: Sequence[Size]) -> int:
        """Ten for each pixel of their heights."""
        if self.refusal is not None:
            raise self.refusal
        return sum(10 * height for _, height in sizes)

    async def act_on_slot(
        self, replica_id: str, action: str, slot_id: int, name: str
    ) -> SlotAction:
        self.slot_actions.append((replica_id, action, slot_id, name))
        if self.refusal is not None:
            raise self.refusal
        return SlotAction(slot_id, 17, 170, 0.25)

    async def explain(self, wanted: str) -> Answers[RequestRecord]:
        found = (record for record in self.records if record.belongs_to(wanted))
        return Answers(tuple(found), self.missing)

    async def embed(
        self,
        texts: tuple[tuple[int, ...], ...],
        client: str,
        *,
        background: bool = False,
        media: tuple[Medium, ...] = (),
    ) -> NDArray[np.float32]:
        """Of each text: its last token, its length and a zero; or what a test wants."""
        self.texts.append(texts)
        self.media += media
        self.clients.append(client)
        if self.refusal is not None:
            raise self.refusal
        if self.vectors is not None:
            return self.vectors
        return np.array([[text[-1], len(text), 0] for text in texts], np.float32)

    failure: CorralError | None = None

    async def load(self) -> None:
        self.is_loaded = True

    async def load_adapter(self, adapter: AdapterConfig) -> None:
        self.adapters.append(adapter)
        if self.refusal is not None:
            raise self.refusal

    async def unload_adapter(self, adapter_id: str) -> None:
        self.adapters.remove(next(one for one in self.adapters if one.id == adapter_id))

    async def release(self) -> None:
        self.is_loaded = False

    async def replica_states(self) -> dict[str, int]:
        return {"RUNNING": self.n_replicas}

    async def fetching(self) -> Sequence[FetchingReplica]:
        return self.fetching_replicas

    async def stats(self) -> Answers[ReplicaStats]:
        slots = [
            {"id": 0, "state": "idle", "request_id": "cmpl-0" if self.busy else None},
            {"id": 1, "state": "decode", "request_id": "cmpl-1"},
            {"id": 2, "state": "pinned", "request_id": None},
        ]
        numbers = {"n_past": 9, "n_prompt": 7, "n_generated": 3}
        engine = STATS | {"slots": [slot | numbers for slot in slots]}
        return Answers((ReplicaStats("r1", "n1", engine),) * self.n_replicas, self.missing)


def chat(content: str = "Hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    bodies = [line.removeprefix("data: ") for line in lines]
    return [body if body == "[DONE]" else json.loads(body) for body in bodies]


def ndjson(response: httpx.Response) -> list[dict[str, Any]]:
    """A stream's lines."""
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.removesuffix("\n").split("\n")]


def named_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Events that are named after their `type`."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
