"""The request of an ingress to an engine. Plain, frozen, picklable: it crosses the handle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from serve_app.base.sampling import SamplingParams
from serve_app.base.values.adapters import Adapters, adapted_group
from serve_app.base.values.media import Medium


def account(client: str, *, background: bool) -> str:
    return f"{client}\0background" if background else client


class Deadline(NamedTuple):
    """The seconds within which a client wants its first token, and the end of its answer."""

    first_token_s: float = math.inf
    end_s: float = math.inf

    def after(self, seconds: float) -> Deadline:
        """The deadline as it is so many seconds later."""
        return Deadline(self.first_token_s - seconds, self.end_s - seconds)


NO_DEADLINE = Deadline()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to continue. `id` is unique among the engine's live requests."""

    id: str
    prompt: tuple[int, ...]
    """Token ids of the model's own vocabulary: at least one, and fewer than a slot's context. MEDIUM stands
    for each of `media` until an engine puts its tokens there."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    client: str = ""
    """The client that sent the request: slots are shared fairly among clients."""
    priority: int = 0
    """Lower ones get a slot first, as in vLLM."""
    context_shift: bool | None = None
    """Whether it goes on when its context is full, with its oldest tokens dropped, if it has
    `max_tokens`; None: as the engine's options say."""
    n_keep: int | None = None
    """First tokens that a context shift keeps; -1: the prompt; None: as the engine's options say."""
    http_id: str = ""
    generated: tuple[int, ...] = ()
    """The first tokens of the answer, which other replicas began: their text is delivered."""
    n_failovers: int = 0
    """The number of replicas that began the request and could not end it."""
    failovers_s: tuple[float, ...] = ()
    """The seconds that the request spent with each of these replicas, as far as they are known."""
    n_discard: int = 0
    """Tokens that a context shift drops; 0: half of what it may."""
    n_cache_reuse: int = 0
    """Chunks of so many tokens or more are taken from a slot, too, that stand there behind tokens which the
    prompt does not have. They are moved up, and not quite what would be computed. 0: none."""
    slot_id: int = -1
    """The slot that it gets if that is idle; -1: the best one."""
    return_progress: bool = False
    """Whether its stream tells how far its prompt is computed."""
    cache_group: str = ""
    """The requests that share prefixes in the KV cache: nothing else is a start for them. Empty for all
    that come without API keys and without a `cache_salt`."""
    background: bool = False
    """Whether nobody waits for it: it gets what others leave within their shares, at any `priority`."""
    told_together: bool = False
    """Whether nobody reads along: but for its first one, its tokens may come several at a time."""
    adapters: Adapters = ()
    """The request's LoRA adapters. KV computed with them is of no use with others."""
    media: tuple[Medium, ...] = ()
    deadline: Deadline = NO_DEADLINE
    """The engine refuses the request at once if it forecasts to miss the deadline. A request in the
    background leaves the background if that is how it meets the deadline."""
    n_preparing: int = 0
    """The requests that its ingress was about to send when it sent this one."""

    @property
    def account(self) -> str:
        """The account that its costs are charged to: a client's background requests have their own."""
        return account(self.client, background=self.background)

    @property
    def content_group(self) -> str:
        """The requests with which this one shares the KV cache: its cache group's, with its adapters."""
        return adapted_group(self.cache_group, self.adapters)

    @property
    def all_tokens(self) -> tuple[int, ...]:
        """All tokens to be computed before its next one."""
        return self.prompt + self.generated
