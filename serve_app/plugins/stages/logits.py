"""Logits on their way to an engine: of most rows, samplers need the highest only.

All logits of a row are 300 KB for a vocabulary of 152,000 tokens, and its 41 highest are 328 bytes. These
are sent as they are, while all logits of a row become 16-bit floats, as other arrays do.
"""

from __future__ import annotations

import numpy as np

from serve_app.kernels.llama.sampling import cuts
from serve_app.kernels.openvino.paged.compiling import LOGITS
from serve_app.kernels.openvino.paged.model import HIGHEST, Values

_TOKENS, _BITS, _N_VOCAB = "tokens", "bits", "n_vocab"


def highest_of(values: Values, inputs: Values) -> Values:
    """Logits, of which the `inputs` say how many of the highest are needed of each row: 0 for all.
    The rest is left out where that changes nothing."""
    if LOGITS not in values or HIGHEST not in inputs:
        return values
    logits, n_told = values[LOGITS], np.zeros(len(inputs[HIGHEST]), np.int32)
    tokens, bits = [np.empty(0, np.intp)], [np.empty(0, np.float32)]
    for i, n in enumerate(inputs[HIGHEST].tolist()):
        if (highest := cuts.highest_distinct(logits[i], n)) is not None:
            n_told[i] = highest[0].size
            tokens.append(highest[0])
            bits.append(highest[1])
    return {
        LOGITS: logits[n_told == 0],
        HIGHEST: n_told,
        _TOKENS: np.concatenate(tokens).astype(np.int32),
        _BITS: np.concatenate(bits).view(np.int32),
        _N_VOCAB: np.array([logits.shape[1]], np.int32),
    }


def rows_of(values: Values) -> Values:
    """Values with a row of logits for each that `highest_of` got; those that were left out are -inf."""
    if HIGHEST not in values or LOGITS not in values:
        return values
    n_told = values[HIGHEST]
    logits = np.full((len(n_told), int(values[_N_VOCAB][0])), -np.inf, np.float32)
    logits[n_told == 0] = values[LOGITS]
    logits[np.repeat(np.arange(len(n_told)), n_told), values[_TOKENS]] = values[_BITS].view(
        np.float32
    )
    return {LOGITS: logits, HIGHEST: n_told}
