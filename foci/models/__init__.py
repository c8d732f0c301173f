"""Small trained models that ship with the package, one folder each: weights, config, score, data and licence.

pretrained: loads them; `foci.pretrained(name)` is the public function
untrained: untrained vectors for a sentence, which show how attention works
"""

from pathlib import Path

# One folder per model, next to this file. `foci --help` lists them without importing torch.
MODELS_DIRECTORY = Path(__file__).parent


def list_pretrained() -> list[str]:
    """Lists the names of the models that ship."""
    return sorted({file.parent.name for file in MODELS_DIRECTORY.glob("*/*.safetensors")})
