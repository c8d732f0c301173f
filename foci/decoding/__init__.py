"""Autoregressive generation: greedy decoding, sampling and beam search, with or without a cache.

sampling: chooses the next token from the logits; `Sampling` holds the settings.
stopping: decides where an answer ends; `Answer` is the result for one prompt.
steps: batches the prompts and runs the model one token at a time, with a growing cache or with none.
cpu_steps: runs the same steps on a CPU, with products and attention in C.
step_c: the C functions of a step, and the likeliest tokens of each row.
static_cache: runs the same steps in buffers of fixed size, as CUDA graphs or through torch.compile.
beam: extends the likeliest hypotheses of each prompt; `Beam` holds the settings.
generation: the public functions `generate` and `stream`.
"""

from foci.decoding.beam import Beam
from foci.decoding.generation import generate, stream
from foci.decoding.sampling import Sampling
from foci.decoding.stopping import Answer

__all__ = ["Answer", "Beam", "Sampling", "generate", "stream"]


def __dir__() -> list[str]:
    return sorted(__all__)
