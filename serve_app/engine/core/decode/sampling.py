"""Samples the tokens that follow a computed chunk. Pure but for the sequence's sampler."""

from __future__ import annotations

import logging

from serve_app.engine.core.scheduler.batch import Chunk
from serve_app.errors import ConstraintError, CorralError, DecodeError
from serve_app.types import Sampled

logger = logging.getLogger("corral.engine")


def sample(chunk: Chunk) -> list[Sampled] | CorralError:
    """The tokens that follow: one, and one more for each drafted one that it confirms; none before
    the prompt's end. A failure is returned, not raised, because it is no reason to end other
    sequences: a grammar may allow no token, or a sampler may break. Decoder thread only."""
    try:
        return _sampled(chunk)
    except ConstraintError as error:
        return error
    except Exception as error:
        logger.exception("The sampler of %s broke.", chunk.sequence.id)
        return DecodeError(f"No token could be picked: {error}")


def _sampled(chunk: Chunk) -> list[Sampled]:
    if chunk.scored:
        chunk.sequence.score(chunk.scored)
    if chunk.sample_row is None or chunk.sequence.n_left == 0:
        return []
    sampler = chunk.sequence.sampler
    sampled = [sampler.sample(chunk.sample_row)]
    for row, drafted in enumerate(chunk.draft, chunk.sample_row + 1):
        if sampled[-1].token != drafted or sampled[-1].complete:
            break
        sampled.append(sampler.sample(row))
    return sampled
