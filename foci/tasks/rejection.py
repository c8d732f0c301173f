"""Declines inputs that belong to none of a model's classes: a small network that reads the model's features.

N inputs, D features, H hidden units.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from foci.tasks.task_files import check_numbers, parse_object

# The file of a task that holds it.
REJECTION_FILE = "rejection.json"
# The training of the network: full batches, so that it takes seconds.
STEPS, RATE, DECAY = 400, 0.01, 0.01


@dataclass(frozen=True)
class Rejection:
    """Scores how unlike the known inputs an input is, and declines it above a threshold.

    >>> known, others = torch.randn(200, 4), torch.randn(200, 4) + 6.0
    >>> rejection = Rejection.fit(known, others, hidden=4).with_threshold(known, lost=0.01)
    >>> bool(rejection.declines(others).float().mean() > 0.9), bool(rejection.declines(known).float().mean() <= 0.01)
    (True, True)
    """

    hidden: Tensor  # (H, 1 + D), the first column is the bias
    output: Tensor  # (1 + H,)
    threshold: float = 0.0

    def scores(self, features: Tensor) -> Tensor:
        """Scores features (N, D): above the threshold, the input is declined; (N,)."""
        hidden, output = self.hidden.to(features), self.output.to(features)
        return F.relu(F.linear(features, hidden[:, 1:], hidden[:, 0])) @ output[1:] + output[0]

    def declines(self, features: Tensor) -> Tensor:
        """Whether each input belongs to none of the classes: bool (N,)."""
        return self.scores(features.float()) > self.threshold

    @classmethod
    def fit(cls, known: Tensor, others: Tensor, *, hidden: int = 16, decay: float = DECAY, seed: int = 0) -> Self:
        """Trains the network to tell known inputs (N, D) from others (M, D); both weigh the same."""
        features = torch.cat([known, others]).float()
        mean, std = features.mean(0), features.std(0).clamp(min=1e-3)
        features = (features - mean) / std
        targets = torch.cat([torch.zeros(len(known)), torch.ones(len(others))])
        weights = torch.cat([torch.full((len(each),), 0.5 / len(each)) for each in (known, others)])
        generator = torch.Generator().manual_seed(seed)
        inner = torch.randn(hidden, 1 + features.shape[1], generator=generator) / features.shape[1] ** 0.5
        outer = torch.randn(1 + hidden, generator=generator) / hidden**0.5
        network = cls(inner.requires_grad_(), outer.requires_grad_())
        optimizer = torch.optim.AdamW([inner, outer], lr=RATE, weight_decay=decay)
        with torch.enable_grad():
            for _ in range(STEPS):
                loss = F.binary_cross_entropy_with_logits(network.scores(features), targets, weights, reduction="sum")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        # The standardization becomes a part of the first layer.
        scaled = inner.detach()[:, 1:] / std
        bias = inner.detach()[:, 0] - scaled @ mean
        return cls(torch.cat([bias[:, None], scaled], 1), outer.detach())

    def with_threshold(self, known: Tensor, lost: float) -> Self:
        """The same network with the threshold that declines this share of known inputs."""
        scores = self.scores(known.float()).sort().values
        kept = min(max(round(len(scores) * (1.0 - lost)), 1), len(scores))
        return type(self)(self.hidden, self.output, float(scores[kept - 1]))

    def to_json(self) -> str:
        """The network as a file of a task."""
        rows = [[round(value, 5) for value in row] for row in self.hidden.tolist()]
        return json.dumps({"hidden": rows, "output": self.output.tolist(), "threshold": self.threshold})

    @classmethod
    def from_files(cls, files: dict[str, str]) -> Self | None:
        """Reads the result of `to_json` from the files of a task; None if they have none."""
        if REJECTION_FILE not in files:
            return None
        hidden, output, threshold = parse_object(files[REJECTION_FILE], REJECTION_FILE, "hidden", "output", "threshold")
        rows = [check_numbers(row, "hidden") for row in hidden] if isinstance(hidden, list) else []
        outer = check_numbers(output, "output")
        if len(rows) + 1 != len(outer) or len({len(row) for row in rows}) != 1:
            raise ValueError(
                f"{REJECTION_FILE} must have one output for each row and for the bias, got {len(rows)} and {len(outer)}"
            )
        return cls(torch.tensor(rows), torch.tensor(outer), check_numbers([threshold], "threshold")[0])
