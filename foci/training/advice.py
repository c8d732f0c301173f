"""Messages about a training run that looks wrong, each with the setting that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from foci.nn.config import Config
from foci.runtime.console import format_count
from foci.training.config import RunConfig, TrainConfig, fields_with_values

# Below these numbers a training run rarely learns enough, and dev scores vary by chance.
FEW_STEPS, FEW_DEV_EXAMPLES = 300, 50
# A warm-up should take less than this share of the steps.
MAX_WARMUP_SHARE = 0.5
# A dev loss that fell by more than this share since the evaluation before would fall further.
FALLING_SHARE = 0.05


def describe_filled(given: RunConfig, filled: RunConfig) -> list[str]:
    """Lists the settings that were chosen from the data, as --set accepts them."""
    sections = ((given.settings, filled.settings), (given.train, filled.train))
    chosen = [text for before, after in sections for text in changed_fields(before, after)]
    return [f"chosen from the data: {', '.join(chosen)}"] if chosen else []


def changed_fields(before: Config, after: Config) -> Iterator[str]:
    for name, value in fields_with_values(after).items():
        if getattr(before, name) is None:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            yield f"{after.field_path(name)}={text}"


def find_run_warnings(config: TrainConfig, total: int, dev_examples: int) -> Iterator[str]:
    """Yields what looks wrong before the first step."""
    warmup = config.warmup or 0
    if warmup >= MAX_WARMUP_SHARE * total:
        text = f"train.warmup is {format_count(warmup, 'step')} of {total:,}"
        text += ": the learning rate never decays" if warmup >= total else ""
        yield f"{text}; use --set train.warmup={total // 10}, or train for more steps"
    if total < FEW_STEPS:
        yield f"{format_count(total, 'step')} are few: use a higher train.epochs or a lower train.batch_tokens"
    if dev_examples < FEW_DEV_EXAMPLES:
        examples = format_count(dev_examples, "example")
        yield f"a dev set of {examples} gives rough scores: use --dev, or --set train.dev_share=0.2"


def find_result_warnings(config: TrainConfig, losses: Sequence[float], best_step: int, steps: int) -> Iterator[str]:
    """Yields what looks wrong in a finished training, from the dev losses, the best step and all steps."""
    if best_step < steps / 2:
        yield (
            f"the best model is that of step {best_step:,} of {steps:,}: later ones fit only the training data better;"
            " use more data or a higher task.dropout"
        )
    elif len(losses) > 1 and best_step == steps and losses[-1] < (1 - FALLING_SHARE) * losses[-2]:
        more = f"train.steps={2 * steps}" if config.steps else f"train.epochs={2 * (config.epochs or 1):g}"
        yield f"the dev loss was still falling: more steps may help, with --resume --set {more}"
