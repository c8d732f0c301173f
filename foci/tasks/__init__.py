"""Tasks that attention models are trained for, each one file with the methods of `Task`.

task: the `Task` interface: read data, make batches, loss, decode, score, record attention
parallel_text: pairs of sentences, read from tables or parallel files, and checked
translation: sentence to sentence, by a Transformer or an RNN with attention
copying: unseen names in a translation, spelled as in its source
generation: language modelling and text continuation
summarization: document to summary, with copying
minimum_bayes_risk: picks the answer that agrees most with the other candidates
sentiment: text classification
vision: image classification
class_prediction: the answer of a classifier, and accuracy
rejection: declines inputs that belong to none of the classes
speech_features: recordings to features, with augmentation
speech: speech recognition by CTC and an attention decoder
rdrop: the R-Drop loss of two passes with different dropout
task_record: the weights of a model as a labelled Record
task_files: the JSON files of a task in a model file
model_file: a trained model with its task in safetensors files
"""

from __future__ import annotations

import reprlib
from importlib import import_module
from typing import Any

from foci.runtime.spelling import suggest_name
from foci.tasks.task import Problem, Task

__all__ = ["TASKS", "Problem", "Task", "find_task"]

# module:class of each task; imported on first use, because each needs other packages.
TASKS = {
    "translation": "foci.tasks.translation:Translation",
    "generation": "foci.tasks.generation:Generation",
    "vision": "foci.tasks.vision:Vision",
    "sentiment": "foci.tasks.sentiment:Sentiment",
    "speech": "foci.tasks.speech:Speech",
    "summarization": "foci.tasks.summarization:Summarization",
}


def find_task(name: str) -> type[Task[Any, Any]]:
    """Returns the class of a task by name.

    >>> import foci.tasks
    >>> foci.tasks.find_task("translation").metric
    'bleu'
    """
    # The name may come from a file, where it can be anything.
    if not isinstance(name, str) or name not in TASKS:
        raise ValueError(
            f"task must be one of {', '.join(TASKS)}, got {reprlib.repr(name)}{suggest_name(str(name), TASKS)}"
        )
    module, kind = TASKS[name].split(":")
    task: type[Task[Any, Any]] = getattr(import_module(module), kind)
    return task
