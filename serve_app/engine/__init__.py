"""The batched engine, usable as a library."""

from serve_app.engine.embedding import Texts
from serve_app.engine.engine import Engine
from serve_app.engine.metrics.stats import CachedPrefixes, EngineStats, SlotStats
from serve_app.engine.options import EngineOptions
from serve_app.engine.stream import TokenStream
from serve_app.errors import (
    ConfigError,
    CorralError,
    DecodeError,
    EngineClosedError,
    EngineFailedError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from serve_app.sampling import SamplingParams
from serve_app.types import (
    FinishReason,
    GenerationRequest,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)

__all__ = [
    "CachedPrefixes",
    "ConfigError",
    "CorralError",
    "DecodeError",
    "Engine",
    "EngineClosedError",
    "EngineFailedError",
    "EngineOptions",
    "EngineStats",
    "FinishReason",
    "GenerationRequest",
    "InvalidRequestError",
    "PromptTooLongError",
    "QueueFullError",
    "SamplingParams",
    "SequenceEnd",
    "SlotStats",
    "Texts",
    "Timings",
    "TokenDelta",
    "TokenStream",
    "Usage",
]
