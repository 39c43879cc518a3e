"""A Kalman filter of relative errors: which of many numbers a wrong forecast is due to. Pure: no clock.

Each error tells one number about all that a forecast is made of. The filter knows how unsure each of these
is, and which were wrong together. Source: Kalman, "A New Approach to Linear Filtering and Prediction
Problems", 1960; errors are bounded as in Huber, "Robust Estimation of a Location Parameter", 1964.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

# Batches that are forecast rightly differ from that by so much, as a variance of the relative error.
_NOISE = 0.08**2
# An error counts up to so many standard deviations: more may be a hiccup. One that stays is learnt anyway.
_MOST_DEVIATIONS = 2.0


class Estimates:
    """Numbers that are learnt from forecasts' errors."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._covariance = np.zeros((0, 0))
        self._drift, self._jump = np.zeros(0), np.zeros(0)
        self._most = np.zeros(0)

    def add(
        self,
        value: float,
        variance: float,
        drift: float,
        *,
        jump: float = 0.0,
        least: float = -math.inf,
    ) -> int:
        """One more, and its index. It becomes unsure again by `drift` with each error that is learnt from,
        until it is as unsure as at the beginning; and by `jump` with each that is too large to be noise."""
        self.values.append(value)
        n = len(self.values)
        covariance = np.zeros((n, n))
        covariance[:-1, :-1] = self._covariance
        covariance[-1, -1] = variance
        self._covariance = covariance
        self._drift = np.append(self._drift, drift)
        self._jump = np.append(self._jump, jump)
        self._most = np.append(self._most, variance)
        return n - 1

    def learn(self, shares: Mapping[int, float], error: float) -> None:
        """Move them by what was, less the forecast, by the forecast. A share says how much the forecast
        grows, relatively, with that number."""
        diagonal = np.einsum("ii->i", self._covariance)
        np.add(diagonal, self._drift, out=diagonal, where=diagonal < self._most)
        indices, parts = list(shares), np.array(list(shares.values()))
        due = parts @ self._covariance[indices]  # it is symmetric
        variance = _NOISE + float(parts @ due[indices])
        most = _MOST_DEVIATIONS * math.sqrt(variance)
        moved = due * (max(-most, min(most, error)) / variance)
        self.values = (moved + self.values).tolist()
        if abs(error) <= most:
            self._covariance -= np.outer(due, due) / variance
        else:  # a hiccup, which tells nothing, or something has changed
            diagonal += self._jump
