"""Errors for options that a command does not have: misspelt options, and settings, which --set changes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from difflib import get_close_matches

from foci.runtime.spelling import suggest_name

# Names that other training tools give to settings.
SETTING_ALIASES = {"lr": "rate", "learning_rate": "rate", "batch_size": "batch_tokens", "weight_decay": "decay"}
# Options with which other translators choose languages.
LANGUAGE_OPTIONS = ("from", "to", "source", "target", "src", "tgt", "lang", "language")
LANGUAGE_HINT = ": a translator has the languages of its training pairs; the pretrained one is English to German"


def explain_unknown_option(words: Sequence[str], unknown: str, options: Collection[str], task: str | None) -> str:
    """The end of an error message: the setting of that name, or the most similar option; `words`: the command line.

    >>> explain_unknown_option(["translation", "--epochs", "3"], "--epochs", ["--set", "--settings"], "translation")
    ': use --set train.epochs=3'
    >>> explain_unknown_option(["--sise", "tiny"], "--sise", ["--size", "--set"], None)
    ': did you mean --size?'
    """
    option = unknown.partition("=")[0]
    name = option.lstrip("-").replace("-", "_")
    keys = list_setting_keys(task, with_training="--settings" in options) if "--set" in options else {}
    name = SETTING_ALIASES.get(name, name)
    if name in LANGUAGE_OPTIONS and "--model" in options:
        return LANGUAGE_HINT
    if name not in keys and (hint := suggest_name(option, options)):
        return hint
    similar = get_close_matches(name, keys, 1)
    return f": use --set {keys[similar[0]]}={read_value(words, unknown)}" if similar else ""


def read_value(words: Sequence[str], option: str) -> str:
    """The value that was given to an option, as --option=value or as the next word."""
    _, has_value, value = option.partition("=")
    following = [*words[words.index(option) + 1 :], "-"][0]
    return value if has_value else "..." if following.startswith("-") else following


def list_setting_keys(task: str | None, with_training: bool) -> dict[str, str]:
    """The keys of --set by the name of the setting: {"epochs": "train.epochs"}; of every task if None is known."""
    from foci.tasks import TASKS, find_task
    from foci.training import TrainConfig

    kinds = [find_task(name).settings_type for name in ([task] if task in TASKS else TASKS)]
    keys = {field.name: f"train.{field.name}" for field in fields(TrainConfig)} if with_training else {}
    return keys | {field.name: f"task.{field.name}" for kind in kinds for field in fields(kind)}
