"""The sizing table of docs/models.md: what Corral decides for known models, and for how many people."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from serve_app.cli.measure.users import CHAT_ANSWER, QUESTION, TOKENS_PER_WORD, Lengths
from serve_app.config.schema import EngineConfig
from serve_app.run.sizing import ModelNeeds, resolve
from tests.documents.tables import table

_GIB = 2**30
SYSTEM_BYTES = 2 * _GIB
"""What the table leaves to the system, Ray and the ingress."""
MACHINES = ((2, 4), (2, 8), (4, 16), (8, 16), (8, 32), (16, 64))
"""Physical cores and GiB of memory."""
_MEASURED_CORES, _MEASURED_PARAMETERS = 2, 0.6e9
PERIOD_S = 120
"""Seconds between the questions of a person."""
REASONING_TOKENS = 1000
"""What a model that thinks writes before an answer."""
LOAD = 0.7
"""The part of the time that the machine may be busy, so that queues stay short."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second."""

    alone: float
    together: float
    """Those of 16 sequences."""
    prefill: float

    def times(self, factor: float) -> Speeds:
        """The speeds of a machine, or a model, that is so many times as fast."""
        return Speeds(factor * self.alone, factor * self.together, factor * self.prefill)


# Two cores of an EPYC with AVX-512, 0.6B in Q4_K_M, `llama-batched-bench`.
_MEASURED = Speeds(62.0, 177.0, 450.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model's shape, from its configuration file."""

    name: str
    active_parameters: float
    """That each token is computed with."""
    weight_gb: float
    """Of its GGUF file in Q4_K_M, in 10^9 bytes, rounded."""
    n_layers: int
    n_kv_heads: int
    head_size: int
    n_ctx_train: int
    measured: Speeds | None = None
    """Its own speeds on as many cores; None: by its parameters."""

    def speeds(self, cores: int) -> Speeds:
        """The speeds on so many cores."""
        own = self.measured or _MEASURED.times(_MEASURED_PARAMETERS / self.active_parameters)
        return own.times(cores / _MEASURED_CORES)

    @property
    def needs(self) -> ModelNeeds:
        """For `sizing.resolve`."""
        elements = self.n_layers * self.n_kv_heads * self.head_size
        return ModelNeeds(
            self.n_ctx_train,
            (elements, elements),
            (self.head_size, self.head_size),
            int(self.weight_gb * 1e9),
        )


SHAPES = (
    Shape("Qwen3 0.6B", 0.6e9, 0.40, 28, 8, 128, 40960),
    Shape("Qwen3 1.7B", 1.7e9, 1.11, 28, 8, 128, 40960),
    Shape("Llama 3.2 3B", 3.2e9, 2.02, 28, 8, 128, 131072),
    Shape("Qwen3 4B", 4.0e9, 2.50, 36, 8, 128, 40960),
    Shape("Qwen3 8B", 8.2e9, 5.03, 36, 8, 128, 40960),
    Shape("Qwen3 14B", 14.8e9, 9.00, 40, 8, 128, 40960),
    # By the times of one and of four of its layers. The speed alone is that by its parameters: in four
    # layers, the experts of one token stay in the processor's caches.
    Shape("Qwen3 30B-A3B", 3.3e9, 18.6, 48, 4, 128, 40960, Speeds(11.3, 31.0, 45.0)),
)


def sizes() -> str:
    """A row for each model on each machine with room for it."""
    head = (
        "model",
        "cores (vCPUs)",
        "memory",
        "slots",
        "longest request",
        "tokens/s alone",
        "together",
    )
    return table((*head, "people", "if it thinks"), _rows())


def _rows() -> Iterator[tuple[str, ...]]:
    for shape in SHAPES:
        for cores, gib in MACHINES:
            memory = gib * _GIB - SYSTEM_BYTES
            if shape.needs.weight_bytes > 0.75 * memory:
                continue
            options = resolve(EngineConfig(), shape.needs, cores=cores, memory_bytes=memory)
            yield (
                shape.name,
                f"{cores} ({2 * cores})",
                f"{gib} GiB",
                str(options.n_slots),
                f"{options.n_ctx_slot:,}",
                _rounded(shape.speeds(cores).alone),
                _rounded(shape.speeds(cores).together),
                str(people(shape, cores)),
                str(people(shape, cores, REASONING_TOKENS) or "fewer than 1"),
            )


def people(shape: Shape, cores: int, n_reasoning: int = 0) -> int:
    """Who can chat, by the measured speed scaled to this many cores and parameters: users of the kind
    `chat`, as `corral capacity` has them."""
    speeds = shape.speeds(cores)
    n_prompt = mean(QUESTION) * TOKENS_PER_WORD
    n_answer = mean(CHAT_ANSWER) + n_reasoning
    seconds = n_prompt / speeds.prefill + n_answer / speeds.together
    return int(LOAD * PERIOD_S / seconds)


def mean(lengths: Lengths) -> float:
    """The mean of a log-normal distribution, whose ends are not cut off here."""
    return lengths.median * math.exp(lengths.spread**2 / 2)


def _rounded(speed: float) -> str:
    return f"{speed:.1f}" if speed < 20 else f"{speed:,.0f}"
