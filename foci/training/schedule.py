"""The learning rate schedule: linear warm-up, then decay."""

from __future__ import annotations

import math

from foci.training.config import TrainConfig


def learning_rate_at(step: int, total: int, config: TrainConfig) -> float:
    """Computes the learning rate of a step, counted from 0.

    >>> config = TrainConfig(rate=1.0, warmup=4, floor=0.0)
    >>> [round(learning_rate_at(step, 12, config), 2) for step in range(0, 12, 2)]
    [0.25, 0.75, 1.0, 0.85, 0.5, 0.15]
    """
    warmup = config.warmup or 0
    if step < warmup:
        return config.rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.rate
    if config.schedule == "inverse_sqrt":
        return config.rate * math.sqrt(max(warmup, 1) / (step + 1))
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return config.rate * (config.floor + (1.0 - config.floor) * 0.5 * (1.0 + math.cos(math.pi * done)))
