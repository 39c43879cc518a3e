"""The samplers that leave candidates out and draw one, over as few candidates as give the same draw."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from serve_app.base.sampling import CHAIN, SamplingParams
from serve_app.base.values.answers import TokenLogprobs
from serve_app.kernels.llama.model import Model
from serve_app.kernels.llama.sampling import cuts
from serve_app.kernels.llama.sampling.candidates import Candidates, LogitsSource, Room
from serve_app.kernels.llama.sampling.cuts import Cut

Logits = NDArray[np.float32]

# Candidates that most chains see at most.
_FEW = 64
# llama.cpp reads this seed as "draw one"; ours are always explicit.
_RANDOM_SEED = 0xFFFFFFFF
# As llama.cpp has it: above, XTC leaves nothing out.
_MOST_THRESHOLD = 0.5
# The likeliest candidates, which these samplers get at most. Infill compares each with each, which takes
# minutes for a vocabulary; typical sorts by another order, which takes 20 ms; Mirostat adds up all.
_MOST_INFILL, _MOST_SORTED = 128, 16_384
# The samplers that sort, or may.
_SORTING = {"top_k", "typ_p", "top_p", "min_p", "xtc"}
# Tokens that Mirostat 1 estimates with: llama-server's number.
_MIROSTAT_M = 100


class Chain:
    """The samplers of a sequence from top_n_sigma to the seeded draw, as llama.cpp's own. The first
    stands apart, if a cut can do the same. One thread at a time."""

    def __init__(self, params: SamplingParams, model: Model) -> None:
        self._cut, links, n_cut = _cut_and_samplers(params, model)
        self._is_greedy = self._cut is cuts.greedy
        self._orders = model.n_vocab > cuts.SMALL and _sorts(params)
        self._sees_banned = params.typical_p < 1 or bool(
            {"infill", "adaptive_p"} & set(params.samplers or ())
        )
        """Whether a token that is banned changes what is drawn."""
        self._remembers = not params.mirostat and "adaptive_p" in (params.samplers or ())
        self._n_top = (params.logprobs or 0) if params.post_sampling_probs else None
        needs_logits = self._orders or self._remembers or self._n_top is not None
        self.whole = self._cut is cuts.none and not needs_logits
        """Whether nothing is cut: `pick_of_row` is the sooner one then."""
        self.n_highest = 1 if self._is_greedy else _n_highest(self._cut)
        """The number of the highest logits that a pick depends on; None for all."""
        self._first = _chain(links[:n_cut])
        self._others = _chain(links[n_cut:])
        self._room = Room(_FEW)
        self._order: Cut | None = None
        """All tokens in the order of the logits that the last token was picked by."""
        self.drawn: TokenLogprobs | None = None
        """The probabilities with which the last token was drawn, if the request wants to know."""

    def pick(self, logits: Logits, allowed: NDArray[np.bool_] | None = None) -> int:
        """A token by these logits, which stay as they are. It takes one number of the seed's. `allowed`
        bans other tokens than these. The logits are then those of the last pick, whose order still holds.
        """
        banned = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
        order, self._order = self._order, None
        cut, logits = self._cut(banned), banned
        is_cut = cut is not None
        if cut is None and self._orders:
            if order is None or allowed is None:
                cut = self._order = cuts.sort_all(logits, whole=self._sees_banned)
            else:
                cut = order.among(allowed, whole=self._sees_banned)
        if cut is None:
            return self._pick_of_all(logits)
        if self._is_greedy and is_cut:
            return int(cut.tokens[0])
        n = cut.n_kept
        before = llama_cpp.llama_sampler_clone(self._others) if cut.has_ties else None
        candidates = Candidates(
            cut.tokens[:n], cut.logits[:n], ordered=cut.ordered, room=self._room
        )
        if not is_cut:
            candidates.apply(self._first)
        token = self._pick_of(candidates)
        if before and cut.is_tied(token):
            self._others, before = before, self._others
            token = self._pick_of_all(logits)
        if before:
            llama_cpp.llama_sampler_free(before)
        return token

    def pick_of_row(self, context: LogitsSource, row: int) -> int:
        """Pick a token by the logits that the context has for this row; only if `whole`. llama.cpp
        makes the candidates itself."""
        return context.pick(self._others, row)

    def accept(self, token: int) -> None:
        """The token is the next one of the text."""
        self._order = None
        if self._remembers:
            llama_cpp.llama_sampler_accept(self._others, token)

    def _pick_of(self, candidates: Candidates) -> int:
        candidates.apply(self._others)
        if self._n_top is not None:
            self.drawn = candidates.logprobs(self._n_top)
        return candidates.picked_token

    def _pick_of_all(self, logits: Logits) -> int:
        candidates = Candidates(_all_tokens(logits.size), logits)
        candidates.apply(self._first)
        return self._pick_of(candidates)

    def close(self) -> None:
        """Free the samplers. Idempotent."""
        for chain in (self._first, self._others):
            if chain:
                llama_cpp.llama_sampler_free(chain)
        self._first = self._others = None


@cache
def _all_tokens(n_vocab: int) -> NDArray[np.intp]:
    return np.arange(n_vocab)


def _chain(links: Iterable[llama_cpp.llama_sampler_p]) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for link in links:
        llama_cpp.llama_sampler_chain_add(chain, link)
    return chain


def _cut_and_samplers(
    params: SamplingParams, model: Model
) -> tuple[Callable[[Logits], Cut | None], list[Any], int]:
    """The cut, all samplers, and how many of them it stands for."""
    is_small, is_unusual = model.n_vocab <= cuts.SMALL, _is_unusual(params)
    if params.temperature <= 0 and params.typical_p >= 1 and not is_unusual:
        return cuts.none if is_small else cuts.greedy, [llama_cpp.llama_sampler_init_greedy()], 0
    links, first, n_likeliest = _links(params, model)
    mass, share = _as_float(params.top_p), _as_float(params.min_p)
    if n_likeliest and not is_small:
        whole = is_unusual or params.typical_p < 1
        return partial(cuts.top_k, k=n_likeliest, whole=whole), links, 1
    if first == "top_p" and not is_unusual:
        return partial(cuts.top_p, mass=mass, share=share), links, 1
    if first == "min_p" and not is_unusual:
        return partial(cuts.min_p, share=share), links, 0
    return cuts.none, links, 0


def _n_highest(cut: Callable[[Logits], Cut | None]) -> int | None:
    if not isinstance(cut, partial) or cut.func is not cuts.top_k or cut.keywords["whole"]:
        return None
    n_likeliest: int = cut.keywords["k"]
    return n_likeliest + 1  # which shows whether it has the same logit


def _as_float(share: float) -> float:
    """The share as llama.cpp reads it: what is nearly 1 is 1, and what is nearly 0 is 0."""
    return float(np.float32(share))


def _is_unusual(params: SamplingParams) -> bool:
    """Whether llama.cpp does it all: nobody has shown which cut would give the same draw."""
    uses_xtc = params.xtc_probability > 0 and params.xtc_threshold <= _MOST_THRESHOLD
    return any(
        (
            params.samplers is not None,
            params.mirostat,
            uses_xtc,
            params.min_keep > 1,
            params.dynatemp_range > 0,
            params.post_sampling_probs,
        )
    )


def _sorts(params: SamplingParams) -> bool:
    """Whether some sampler sorts more than `top_k` may leave: numpy does that in a fraction of the time."""
    if _is_unusual(params):
        names = CHAIN if params.samplers is None else params.samplers
        adapts = params.dynatemp_range > 0 and "temperature" in names  # a fixed one sorts nothing
        return bool(params.mirostat or adapts or set(names) & _SORTING)
    if params.top_k > 0:
        return params.top_k > _MOST_SORTED
    return params.typical_p < 1 or params.top_p < 1


def _links(params: SamplingParams, model: Model) -> tuple[list[Any], str, int]:
    """The samplers that change something, in the order that is asked for, and the draw. Beside them,
    the name of the first, and how many of the likeliest tokens that one leaves, if it looks at no more,
    else 0.

    Source: llama.cpp, `common_sampler_init` in common/sampling.cpp.
    """
    seed = _seed(params)
    if params.mirostat:
        tau, eta = params.mirostat_tau, params.mirostat_eta
        draw = (
            llama_cpp.llama_sampler_init_mirostat(model.n_vocab, seed, tau, eta, _MIROSTAT_M)
            if params.mirostat == 1
            else llama_cpp.llama_sampler_init_mirostat_v2(seed, tau, eta)
        )
        links = [llama_cpp.llama_sampler_init_temp(params.temperature), draw]
        if model.n_vocab <= _MOST_SORTED:
            return links, "temperature", 0
        top_k = llama_cpp.llama_sampler_init_top_k(_MOST_SORTED)
        return [top_k, *links], "top_k", _MOST_SORTED
    keep, delta = max(1, params.min_keep), params.dynatemp_range
    makers: dict[str, Callable[[], llama_cpp.llama_sampler_p]] = {
        "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(params.top_n_sigma),
        "top_k": lambda: llama_cpp.llama_sampler_init_top_k(params.top_k),
        "typ_p": lambda: llama_cpp.llama_sampler_init_typical(params.typical_p, keep),
        "top_p": lambda: llama_cpp.llama_sampler_init_top_p(params.top_p, keep),
        "min_p": lambda: llama_cpp.llama_sampler_init_min_p(params.min_p, keep),
        "xtc": lambda: llama_cpp.llama_sampler_init_xtc(
            params.xtc_probability, params.xtc_threshold, keep, seed
        ),
        "temperature": lambda: llama_cpp.llama_sampler_init_temp_ext(
            params.temperature, delta, params.dynatemp_exponent
        ),
        "infill": lambda: llama_cpp.llama_sampler_init_infill(model.vocabulary),
    }
    changes_nothing = {
        "top_n_sigma": params.top_n_sigma <= 0,
        "top_k": params.top_k <= 0,
        "typ_p": params.typical_p >= 1,
        "top_p": _as_float(params.top_p) >= 1,
        "min_p": _as_float(params.min_p) <= 0,
        "xtc": params.xtc_probability <= 0,
    }
    # Each once: each may go over the whole vocabulary, and the request says how many there are.
    asked = dict.fromkeys(CHAIN if params.samplers is None else params.samplers)
    names = [name for name in asked if name in makers and not changes_nothing.get(name)]
    links = list[Any]()
    most = {"infill": _MOST_INFILL}
    if model.n_vocab > _MOST_SORTED:
        most["typ_p"] = _MOST_SORTED
    for name in names:
        if name in most:
            links.append(llama_cpp.llama_sampler_init_top_k(most[name]))
        links.append(makers[name]())
    if "adaptive_p" in asked:
        target, decay = params.adaptive_target, params.adaptive_decay
        links.append(llama_cpp.llama_sampler_init_adaptive_p(target, decay, seed))
    else:
        links.append(llama_cpp.llama_sampler_init_dist(seed))
    first = names[0] if names else ""
    return links, first, params.top_k if first == "top_k" else most.get(first, 0)


def _seed(params: SamplingParams) -> int:
    """A 32-bit seed. OpenAI's are 64-bit and may be negative: they are reduced, not refused."""
    seed = random.getrandbits(32) if params.seed is None else params.seed
    return seed % _RANDOM_SEED
