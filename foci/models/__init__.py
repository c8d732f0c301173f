"""Small trained models that ship with the package, one folder each: weights, config, score, data and licence.

pretrained: loads them; `foci.pretrained(name)` is the public function
untrained: untrained vectors for a sentence, which show how attention works
"""

from pathlib import Path

# One folder per model, next to this file. `foci --help` lists them without importing torch.
MODELS_DIRECTORY = Path(__file__).parent
# What to train a task's model on, and an example of a file, for tasks without a pretrained one.
TRAINING_DATA = {
    "translation": ("pairs of sentences", "pairs.tsv"),
    "generation": ("a text", "book.txt"),
    "vision": ("a folder of images per class", "images/"),
    "sentiment": ("a table of texts and labels", "reviews.tsv"),
    "speech": ("a table of sound files and their texts", "sounds.tsv"),
    "summarization": ("a table of documents and summaries, some ten thousand of them", "documents.tsv"),
}


def list_pretrained() -> list[str]:
    """Lists the names of the models that ship."""
    return sorted({file.parent.name for file in MODELS_DIRECTORY.glob("*/*.safetensors")})


def describe_missing_model(task: str) -> str:
    """Says in one sentence how to get a model for a task that none ships for."""
    data, file = TRAINING_DATA[task]
    return (
        f"no model for {task} ships: train one on {data} (foci train {task} --data {file}) and name it by"
        f" its path, runs/{task}; models ship for {', '.join(list_pretrained()) or 'no task'}"
    )
