"""How a sequence picks its tokens: each sampling parameter is declared here, and nowhere else.

The fields of requests (`serve_app.config.sampling_fields`), the engine's parameters, what
llama-server's routes tell and docs/api/parameters.md's table all come from these declarations.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np
from annotated_types import Interval, Len, MaxLen
from numpy.typing import NDArray

T = TypeVar("T")
Bounds = Interval | MaxLen

StopString = Annotated[str, Len(0, 1024)]
"""An empty one stops nothing."""
_Breaker = Annotated[str, Len(1, 1024)]
_MOST_STOPS, _MOST_BREAKERS = MaxLen(256), MaxLen(16)
StopStrings = Annotated[list[StopString], _MOST_STOPS]
_SHARE = Interval(ge=0, le=1)
_INT_MAX = 2**31 - 1
_SEEDS = Interval(ge=-(2**63), lt=2**63)
Seed = Annotated[int, _SEEDS]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class Api(StrEnum):
    """An API whose requests may have a parameter."""

    OPENAI = "openai"
    """Completions and chat completions; llama-server's own routes take the same."""
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class Taken:
    """How an API takes a parameter."""

    bounds: Bounds | None = None
    name: str | None = None
    """The name in the API's requests; None if it is the parameter's own."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of a parameter."""

    name: str
    type: Any
    """The type hint of the value in the engine."""
    default: Any
    meaning: str
    apis: Mapping[Api, Taken]
    sampler: str | None
    """llama-server's name of the sampler in the chain that reads it; None if there is none."""
    synonyms: Mapping[Any, Any]
    """Values that requests may have, and the engine's that mean the same."""

    def name_in(self, api: Api) -> str:
        """The parameter's name in the API's requests. Raises KeyError if they do not have it."""
        return self.apis[api].name or self.name


def parameter(
    default: T,
    meaning: str,
    bounds: Bounds | None = None,
    *,
    also: Mapping[Api, Taken] = _NOTHING,
    sampler: str | None = None,
    synonyms: Mapping[Any, Any] = _NOTHING,
) -> T:
    """Declare a field of SamplingParams as a parameter that requests give as it is: OpenAI's under the
    field's name within these bounds, other APIs' as `also` says."""
    apis = {Api.OPENAI: Taken(bounds), **also}
    declared = {"meaning": meaning, "apis": apis, "sampler": sampler, "synonyms": synonyms}
    return dataclasses.field(default=default, metadata=declared)


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """How much a text may reason before it must answer. All but numbers are token ids."""

    n_tokens: int
    n_prompt: int
    """Tokens of the prompt: what is behind them is the text."""
    is_open: bool
    """Whether the text begins within the reasoning."""
    opening: tuple[int, ...]
    closing: tuple[int, ...]
    """The tokens that the model ends its reasoning with."""
    forced: tuple[int, ...]
    """The tokens that end it when the budget is used up."""


@dataclass(frozen=True, slots=True)
class Triggers:
    """The texts that a grammar waits for: see `serve_app.kernels.llama.grammars.constraint`."""

    tokens: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LogitBias:
    """Values that are added to the logits of tokens; -inf bans a token. Each token is there once. They
    are packed, as there may be a whole vocabulary of them."""

    ids: bytes = b""
    """The tokens, as int32."""
    added: bytes = b""
    """The values, as float32."""

    @classmethod
    def of(cls, values: Mapping[int, float]) -> LogitBias:
        """The values by token id. Raises OverflowError for ids that no vocabulary has."""
        return cls(array("i", values.keys()).tobytes(), array("f", values.values()).tobytes())

    @property
    def tokens(self) -> NDArray[np.int32]:
        return np.frombuffer(self.ids, np.int32)

    @property
    def values(self) -> NDArray[np.float32]:
        return np.frombuffer(self.added, np.float32)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one sequence picks its tokens. Defaults are llama-server's, except that it stops nowhere.

    Samplers' parameters stand in the order of the chain. Bounds are checked where requests are parsed.
    """

    repeat_penalty: float = parameter(
        1.0,
        "Makes the last tokens less likely the higher it is; 1 changes nothing.",
        Interval(gt=0, le=100),
        sampler="penalties",
    )
    repeat_last_n: int = parameter(
        64,
        "How many last tokens the three penalties look at, prompt included; 0 switches them off, -1 means "
        "the whole context.",
        Interval(ge=-1, le=_INT_MAX),
        sampler="penalties",
    )
    frequency_penalty: float = parameter(
        0.0,
        "Subtracted from a token's logit for each time that it is among the last ones.",
        Interval(ge=-2, le=2),
        sampler="penalties",
    )
    presence_penalty: float = parameter(
        0.0,
        "Subtracted from a token's logit if it is among the last ones.",
        Interval(ge=-2, le=2),
        sampler="penalties",
    )
    dry_multiplier: float = parameter(
        0.0,
        "How much DRY makes tokens less likely that would repeat a sequence; 0 switches it off.",
        Interval(ge=0, le=100),
        sampler="dry",
    )
    dry_base: float = parameter(
        1.75,
        "The base of DRY's penalty: by how much it grows with each token more that is repeated. Below 1, "
        "the default counts.",
        Interval(ge=0, le=100),
    )
    dry_allowed_length: int = parameter(
        2, "Repeated sequences of so many tokens cost nothing.", Interval(ge=0, le=_INT_MAX)
    )
    dry_penalty_last_n: int = parameter(
        64,
        "How many last tokens DRY looks at, prompt included; 0 switches it off, -1 means the whole "
        "context.",
        Interval(ge=-1, le=_INT_MAX),
    )
    dry_sequence_breakers: tuple[_Breaker, ...] = parameter(
        ("\n", ":", '"', "*"), "Strings at which repeated sequences end.", _MOST_BREAKERS
    )
    top_n_sigma: float = parameter(
        -1.0,
        "Keeps tokens whose logit is at most so many standard deviations of all logits below the highest "
        "one; 0 or less keeps all.",
        Interval(ge=-1, le=100),
        sampler="top_n_sigma",
    )
    top_k: int = parameter(
        40,
        "Keeps the k most likely tokens; 0 or less keeps all.",
        Interval(ge=-1, le=_INT_MAX),
        also={Api.ANTHROPIC: Taken(Interval(ge=0, le=_INT_MAX))},
        sampler="top_k",
        synonyms={-1: 0},
    )
    typical_p: float = parameter(
        1.0,
        "Keeps the tokens whose surprise is nearest to the expected one, up to this probability in all; 1 "
        "keeps all. The 16,384 most likely tokens are looked at.",
        _SHARE,
        sampler="typ_p",
    )
    top_p: float = parameter(
        0.95,
        "Keeps the most likely tokens, up to this probability in all; 1 keeps all.",
        _SHARE,
        also={Api.RESPONSES: Taken(_SHARE), Api.ANTHROPIC: Taken(_SHARE)},
        sampler="top_p",
    )
    min_p: float = parameter(
        0.05,
        "Keeps tokens with at least this share of the most likely one's probability; 0 keeps all.",
        _SHARE,
        sampler="min_p",
    )
    xtc_probability: float = parameter(
        0.0,
        "How often XTC leaves out the most likely tokens; 0 switches it off.",
        _SHARE,
        sampler="xtc",
    )
    xtc_threshold: float = parameter(
        0.1,
        "XTC leaves out all tokens with at least this probability but the least likely of them; above 0.5 "
        "it is off.",
        _SHARE,
    )
    min_keep: int = parameter(
        0, "Samplers leave at least so many tokens.", Interval(ge=0, le=_INT_MAX)
    )
    temperature: float = parameter(
        0.8,
        "Divides the logits; 0 picks the most likely token.",
        Interval(ge=0, le=100),
        also={Api.RESPONSES: Taken(Interval(ge=0, le=2)), Api.ANTHROPIC: Taken(_SHARE)},
        sampler="temperature",
    )
    dynatemp_range: float = parameter(
        0.0,
        "The temperature follows the entropy, so far up and down; 0 leaves it as it is.",
        Interval(ge=0, le=100),
    )
    dynatemp_exponent: float = parameter(
        1.0, "How the temperature follows the entropy.", Interval(ge=0, le=100)
    )
    adaptive_target: float = parameter(
        -1.0,
        "With `adaptive_p` among the samplers: the probability that picked tokens shall have on average; "
        "below 0 it draws as usual.",
        Interval(ge=-1, le=1),
    )
    adaptive_decay: float = parameter(
        0.9,
        "How slowly that sampler forgets the probabilities of earlier tokens.",
        Interval(ge=0, le=0.99),
    )
    mirostat: int = parameter(
        0,
        "1 or 2: that version of Mirostat draws, after the temperature and in the place of all other "
        "samplers. The 16,384 most likely tokens are looked at.",
        Interval(ge=0, le=2),
    )
    mirostat_tau: float = parameter(
        5.0, "The surprise, in bits, that Mirostat aims at.", Interval(ge=0, le=100)
    )
    mirostat_eta: float = parameter(
        0.1, "How fast Mirostat learns, from 0 to 1.", Interval(ge=0, le=1)
    )
    seed: int | None = parameter(
        None, "Of the draws; without one, each request draws its own.", _SEEDS
    )
    stop: tuple[StopString, ...] = parameter(
        (),
        "Strings that end the text; they are not part of it.",
        _MOST_STOPS,
        also={Api.ANTHROPIC: Taken(_MOST_STOPS, "stop_sequences")},
    )
    ignore_eos: bool = parameter(False, "Whether to go on where the model would end.")
    n_indent: int = parameter(
        0,
        "The text ends at a line that begins with fewer blanks and tabs; 0 means that none does.",
        Interval(ge=0, le=_INT_MAX),
    )
    t_max_predict_ms: int = parameter(
        0,
        "After so many milliseconds since its first token, the text ends at the next line break; 0 and "
        "-1 set no limit.",
        Interval(ge=-1, le=_INT_MAX),
    )

    samplers: tuple[str, ...] | None = None
    """llama-server's names of the samplers that are used, in their order; None for all in the usual one.
    Each counts once. Penalties and DRY come first, wherever they stand."""
    # What requests do not give as it is: their protocols make it of several fields.
    logit_bias: LogitBias = LogitBias()
    max_tokens: int | None = None
    """None means up to the end of the slot's context; 0 only computes the prompt."""
    grammar: str | None = None
    """The grammar that the text must match, as llguidance writes it: see `serve_app.prompt.grammars`."""
    triggers: Triggers | None = None
    """The texts that the grammar begins with, wherever they appear; None: it begins with the text."""
    preserved_tokens: tuple[int, ...] = ()
    """Control tokens that are told as texts."""
    reasoning: ReasoningBudget | None = None
    """The limit of the reasoning; None: no limit."""
    logprobs: int | None = None
    """The number of most likely tokens whose log probabilities are told with each token's; None: none."""
    post_sampling_probs: bool = False
    """Whether these are the probabilities that the token was drawn with, after all samplers."""
    prompt_logprobs: bool = False
    """Whether the prompt's tokens are told with theirs, too: it is computed whole then."""

    @property
    def penalises(self) -> bool:
        """Whether the last tokens change anything."""
        penalties = self.repeat_penalty, self.frequency_penalty, self.presence_penalty
        is_on = self.repeat_last_n != 0 and penalties != (1, 0, 0)
        return is_on and self.uses("penalties")

    @property
    def counts_repeats(self) -> bool:
        is_on = self.dry_multiplier > 0 and self.dry_penalty_last_n != 0
        return is_on and self.uses("dry")

    @property
    def looks_back(self) -> bool:
        """Whether its samplers look at the tokens so far, those of the prompt among them."""
        return self.penalises or self.counts_repeats

    def uses(self, sampler: str) -> bool:
        """Whether this one, by llama-server's name, is among the samplers. Mirostat takes their place."""
        return not self.mirostat and (self.samplers is None or sampler in self.samplers)


def _find_parameters() -> tuple[Parameter, ...]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    return tuple(
        Parameter(one.name, hints[one.name], one.default, **one.metadata)
        for one in dataclasses.fields(SamplingParams)
        if one.metadata
    )


PARAMETERS = _find_parameters()
CHAIN = tuple(dict.fromkeys(one.sampler for one in PARAMETERS if one.sampler is not None))
"""llama-server's names of Corral's samplers, in their order."""
EXTRA = ("infill", "adaptive_p")
"""Samplers that are used only if a request names them; the last one draws, wherever it stands."""


_NAMES = {name.replace("_", ""): name for name in (*CHAIN, *EXTRA)} | {
    "nucleus": "top_p",
    "typical": "typ_p",
    "typicalp": "typ_p",
    "typ": "typ_p",
    "temp": "temperature",
}
"""The samplers by their names and other names, without hyphens and underscores."""
_LETTERS = dict(zip("edskypmxtia", (*CHAIN, *EXTRA), strict=True))


def samplers_by(names: str | Sequence[str]) -> tuple[str, ...]:
    """Samplers by their names, or by a string of letters; those that nobody knows are left out, as at
    llama-server.

    Source: llama.cpp, `common_sampler_types_from_names` and `common_sampler_types_from_chars` in
    common/sampling.cpp.
    """
    if isinstance(names, str):
        samplers = [_LETTERS.get(letter) for letter in names]
    else:
        plain = (name.lower().replace("-", "").replace("_", "") for name in names)
        samplers = [_NAMES.get(name) for name in plain]
    return tuple(name for name in samplers if name is not None)
