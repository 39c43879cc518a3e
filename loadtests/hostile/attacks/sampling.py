"""Parameters of sampling that take long to prepare, or to follow for each token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from loadtests.hostile.attack import Attack
from loadtests.hostile.scene import Scene, Shot

COMPLETION = "/completion"
_SHAPE = {"prompt", "n_cmpl", "n_predict"}
N_STREAMS, N_VOCAB = 2, 2000
"""Streams at once; tokens of which a logit bias names all."""

FIELDS: dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]] = {
    "empty repetitions": (
        "Groups without a character that repeat 13,000,000 times.",
        lambda: [{"regex": "(?:){13000000}x"}, {"grammar": 'root ::= ""{13000000} "x"'}],
    ),
    "DRY breakers": (
        "16 breakers that are in most tokens, behind a long prompt, for 32 answers.",
        lambda: [
            {
                "dry_multiplier": 1,
                "dry_penalty_last_n": -1,
                "repeat_penalty": 1.1,
                "repeat_last_n": -1,
                "dry_sequence_breakers": breakers,
                "prompt": "the fox of the hill " * 120,
                "n_cmpl": 32,
                "n_predict": 4,
            }
            for breakers in ([*"etaoinsrhldcumfp"], ["the", "of", "and", "x" * 1024])
        ],
    ),
    "logit bias": (
        f"A bias of {N_VOCAB} tokens, by ids and as texts, with log-probabilities.",
        lambda: [
            {"logit_bias": {str(token): token % 9 - 4 for token in range(N_VOCAB)}, "n_probs": 20},
            {"logit_bias": [[chr(0x4E00 + n % 9000), 1] for n in range(20_000)]},
        ],
    ),
    "whole vocabularies": (
        "Samplers that sort all tokens: Mirostat, XTC, typical, and probabilities after sampling.",
        lambda: [
            {"mirostat": 1, "mirostat_tau": 100},
            {"top_k": 0, "typical_p": 0.999, "top_p": 1, "min_p": 0},
            {"top_k": 0, "top_p": 0.9999, "min_p": 0, "xtc_probability": 1, "dynatemp_range": 2},
            {"top_k": 0, "top_p": 1, "min_p": 0, "n_probs": 20, "post_sampling_probs": True},
        ],
    ),
    "many stops": (
        "256 stop strings of 1,000 characters that all but match the text.",
        lambda: [
            {"stop": [f"{'a' * 990}{number:04d}" for number in range(256)], "regex": "a{9000}"},
            {"stop": [f"{' ' * 990}{number:04d}" for number in range(256)], "regex": " {9000}"},
        ],
    ),
}
"""By the attack's name: its description, and the fields of its requests."""


def _sampled(
    scene: Scene, fields: Callable[[], list[dict[str, Any]]], *, usual: bool = False
) -> None:
    """Streams with these fields, as long as the attack lasts; `usual` ones have but their prompts, and are
    as many and as long."""
    base = {"prompt": "Once upon a time", "n_predict": 200, "ignore_eos": True}
    drawn = fields()
    if usual:
        drawn = [{name: one[name] for name in _SHAPE & one.keys()} for one in drawn]
    bodies = [json.dumps(base | one).encode() for one in drawn]

    def shots() -> Iterator[Shot]:
        for body in itertools.cycle(bodies):
            if not scene.left_s():
                return
            yield Shot(COMPLETION, body, "mallory")

    while scene.left_s():  # `fire` takes all that it is to send at once
        scene.fire(itertools.islice(shots(), 4 * len(bodies)), at_once=N_STREAMS)


ATTACKS = tuple(
    Attack(
        name=name,
        family="sampling",
        what=what,
        expects="A token costs the decoder thread little more than others' tokens, and its client pays.",
        act=partial(_sampled, fields=fields),
        beside=partial(_sampled, fields=fields, usual=True),
        is_short=name == "empty repetitions",
    )
    for name, (what, fields) in FIELDS.items()
)
