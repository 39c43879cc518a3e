"""The batched engine, usable as a library."""

from serve_app.engine.embedding import Texts as Texts
from serve_app.engine.engine import Engine as Engine
from serve_app.engine.metrics.stats import CachedPrefixes as CachedPrefixes
from serve_app.engine.metrics.stats import EngineStats as EngineStats
from serve_app.engine.metrics.stats import SlotStats as SlotStats
from serve_app.engine.options import EngineOptions as EngineOptions
from serve_app.engine.stream import TokenStream as TokenStream
from serve_app.errors import ConfigError as ConfigError
from serve_app.errors import CorralError as CorralError
from serve_app.errors import DecodeError as DecodeError
from serve_app.errors import EngineClosedError as EngineClosedError
from serve_app.errors import EngineFailedError as EngineFailedError
from serve_app.errors import InvalidRequestError as InvalidRequestError
from serve_app.errors import PromptTooLongError as PromptTooLongError
from serve_app.errors import QueueFullError as QueueFullError
from serve_app.sampling import SamplingParams as SamplingParams
from serve_app.types import FinishReason as FinishReason
from serve_app.types import GenerationRequest as GenerationRequest
from serve_app.types import SequenceEnd as SequenceEnd
from serve_app.types import Timings as Timings
from serve_app.types import TokenDelta as TokenDelta
from serve_app.types import Usage as Usage
