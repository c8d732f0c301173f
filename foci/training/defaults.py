"""Fills the training settings that are not set, from the number and the lengths of the training examples."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foci.inputs.padding import round_up_length
from foci.training.batches import Batches
from foci.training.config import TrainConfig

# An epoch has about BATCHES_PER_EPOCH batches, each within these limits on examples and tokens.
BATCHES_PER_EPOCH, MIN_BATCH_EXAMPLES, MAX_BATCH_TOKENS = 64, 32, 4096
# EPOCHS by default; little data is repeated up to MAX_EPOCHS times to reach MIN_STEPS.
EPOCHS, MAX_EPOCHS, MIN_STEPS, MAX_STEPS = 20, 100, 1500, 50_000
# The warm-up is a share of all steps. EVALUATIONS per run, more if they would be over MAX_EVALUATE_EVERY steps apart.
WARMUP_SHARE, MAX_WARMUP, EVALUATIONS, MAX_EVALUATE_EVERY = 0.1, 1000, 10, 500


def choose_batch_tokens(sizes: Sequence[int], micro_batches: int) -> int:
    """Chooses the tokens of a micro-batch, so that an epoch has enough steps and a batch enough examples.

    >>> choose_batch_tokens([12] * 2000, micro_batches=1), choose_batch_tokens([30] * 100_000, micro_batches=1)
    (512, 4096)
    """
    examples = max(len(sizes) // BATCHES_PER_EPOCH, MIN_BATCH_EXAMPLES)
    mean = sum(map(round_up_length, sizes)) / max(len(sizes), 1)
    return max(min(math.ceil(examples * mean), MAX_BATCH_TOKENS) // micro_batches, 1)


def choose_epochs(steps_per_epoch: int) -> float:
    """Chooses the number of epochs: more for little data, fewer for very much.

    >>> choose_epochs(5), choose_epochs(60), choose_epochs(300), choose_epochs(10_000)
    (100.0, 25.0, 20.0, 5.0)
    """
    fewest = min(math.ceil(MIN_STEPS / steps_per_epoch), MAX_EPOCHS)
    most = max(MAX_STEPS // steps_per_epoch, 1)
    return float(min(max(EPOCHS, fewest), most))


def count_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Counts the optimizer steps of a training run."""
    return config.steps or math.ceil((config.epochs or EPOCHS) * steps_per_epoch)


def fill_shares(config: TrainConfig, total: int) -> TrainConfig:
    """Fills the settings that are a share of all steps.

    >>> filled = fill_shares(TrainConfig(evaluate_every=400), total=1500)
    >>> filled.warmup, filled.evaluate_every
    (150, 400)
    """
    warmup = min(math.ceil(WARMUP_SHARE * total), MAX_WARMUP)
    evaluate_every = min(math.ceil(total / EVALUATIONS), MAX_EVALUATE_EVERY)
    return config.fill(warmup=warmup, evaluate_every=evaluate_every)


def fill_train_config(config: TrainConfig, source: Batches) -> tuple[TrainConfig, int]:
    """Fills what is not set, sets the budget of the batches, and returns the config and the steps per epoch."""
    if config.batch_tokens is None:
        config = config.replace(batch_tokens=choose_batch_tokens(source.first_epoch_sizes(), source.micro_batch_count))
    source.budget = config.batch_tokens or MAX_BATCH_TOKENS
    steps_per_epoch = len(source.epoch_batches(0)[1])
    config = config.fill(epochs=choose_epochs(steps_per_epoch))
    return fill_shares(config, count_steps(config, steps_per_epoch)), steps_per_epoch
