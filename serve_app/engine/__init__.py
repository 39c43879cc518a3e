"""The batched engine, usable as a library."""

from serve_app.base.engine_options import EngineOptions as EngineOptions
from serve_app.base.errors import ConfigError as ConfigError
from serve_app.base.errors import CorralError as CorralError
from serve_app.base.errors import DecodeError as DecodeError
from serve_app.base.errors import EngineClosedError as EngineClosedError
from serve_app.base.errors import EngineFailedError as EngineFailedError
from serve_app.base.errors import InvalidRequestError as InvalidRequestError
from serve_app.base.errors import PromptTooLongError as PromptTooLongError
from serve_app.base.errors import QueueFullError as QueueFullError
from serve_app.base.sampling import SamplingParams as SamplingParams
from serve_app.base.values.answers import FinishReason as FinishReason
from serve_app.base.values.answers import SequenceEnd as SequenceEnd
from serve_app.base.values.answers import Timings as Timings
from serve_app.base.values.answers import TokenDelta as TokenDelta
from serve_app.base.values.answers import Usage as Usage
from serve_app.base.values.requests import GenerationRequest as GenerationRequest
from serve_app.engine.engine import Engine as Engine
from serve_app.engine.guests.embedding import Texts as Texts
from serve_app.engine.metrics.stats import CachedPrefixes as CachedPrefixes
from serve_app.engine.metrics.stats import EngineStats as EngineStats
from serve_app.engine.metrics.stats import SlotStats as SlotStats
from serve_app.engine.stream import TokenStream as TokenStream
