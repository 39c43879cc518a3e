"""Samples the tokens that follow a computed chunk. Pure but for the sequence's sampler."""

from __future__ import annotations

from serve_app.engine.scheduler.batch import Chunk
from serve_app.errors import ConstraintError
from serve_app.types import Sampled


def sample(chunk: Chunk) -> list[Sampled] | ConstraintError:
    """The tokens that follow: one, and one more for each drafted one that it confirms; none before the
    prompt's end. A grammar that allows none is returned as the error. Decoder thread only."""
    if chunk.scored:
        chunk.sequence.score(chunk.scored)
    if chunk.sample_row is None or chunk.sequence.n_left == 0:
        return []
    sampler = chunk.sequence.sampler
    try:
        sampled = [sampler.sample(chunk.sample_row)]
        for row, drafted in enumerate(chunk.draft, chunk.sample_row + 1):
            if sampled[-1].token != drafted or sampled[-1].complete:
                break
            sampled.append(sampler.sample(row))
    except ConstraintError as error:
        return error
    return sampled
