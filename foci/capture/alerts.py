"""Alerts of `foci.Monitor`: statistics of heads beyond their thresholds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from foci.record.history import StepStatistics

# MuonClip's threshold for the largest logit; NaN and infinite logits always raise an alert.
DEFAULT_ALERTS = {"largest_logit": 100.0}
# Statistics of which a small value is the worrying one.
ALERT_BELOW = ("entropy", "least_entropy")


class AttentionWarning(UserWarning):
    """The warning about an alert of `foci.Monitor`."""


@dataclass(frozen=True)
class Alert:
    """A statistic beyond its threshold at one step.

    statistic: its name; step; value and head ("L5H3"): the worst one; heads: all of them, with their values.
    """

    statistic: str
    step: int
    value: float
    head: str
    threshold: float
    heads: dict[str, float]

    def __str__(self) -> str:
        side = "below" if self.statistic in ALERT_BELOW else "above"
        others = f", {len(self.heads)} heads" if len(self.heads) > 1 else ""
        value = f"{self.value:.0f}" if abs(self.value) >= 100 else f"{self.value:.3g}"
        place = f"{self.statistic.replace('_', ' ')} {value} in {self.head} at step {self.step:,}"
        return (
            f"{place} (NaN or infinite logits{others})"
            if math.isnan(self.value)
            else (f"{place} ({side} {self.threshold:g}{others})")
        )


def find_alerts(entry: StepStatistics, thresholds: Mapping[str, float]) -> list[Alert]:
    """The alerts of a step, one per statistic, with the worst head."""
    alerts = []
    for statistic in dict.fromkeys((*thresholds, "largest_logit")):
        threshold = thresholds.get(statistic, math.inf)
        sign = -1.0 if statistic in ALERT_BELOW else 1.0
        beyond: dict[str, float] = {}
        for layer, found in entry.layers.items():
            for head, value in enumerate(found[statistic].tolist() if statistic in found else ()):
                is_invalid = statistic == "largest_logit" and (math.isnan(value) or value == math.inf)
                if is_invalid or sign * value > sign * threshold:
                    beyond[f"{layer}H{head}"] = value
        if beyond:
            worst = max(beyond, key=lambda head: math.inf if math.isnan(beyond[head]) else sign * beyond[head])
            alerts.append(Alert(statistic, entry.step, beyond[worst], worst, threshold, beyond))
    return alerts


def warn_about(alert: Alert) -> None:
    warnings.warn(AttentionWarning(str(alert)), stacklevel=4)
