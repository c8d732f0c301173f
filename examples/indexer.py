"""Trains an indexer: two heads that find the keys to which a layer of a language model attends.

    python examples/indexer.py shakespeare.txt
    python examples/indexer.py shakespeare.txt --model runs/mine --layer 2 --steps 400

Sparse attention computes only the keys that an indexer chooses. The indexer learns from the attention of the layer
itself, the mean of all heads: `foci.losses.divergence` compares both without building a matrix. The printed share is
what the chosen 64 of 512 keys hold of the attention on the 64 heaviest keys, over held-out text, for queries that see
more than 64 keys. The model is one that `foci train generation` trained; the one that comes with foci by default.

B batch, H heads, T tokens, D width of the model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import foci

LENGTH = 512
CHOSEN = 64
HEADS = 2
WIDTH = 64
HELD_OUT = 0.1


class Indexer(nn.Module):
    """A small attention over the input of a layer, the mean of its heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 2 * HEADS * WIDTH, bias=False)

    def forward(self, x: Tensor) -> foci.Weights:
        """The mean weights (B, T, T) for the input (B, T, D) of a layer."""
        heads = self.project(x).unflatten(-1, (2 * HEADS, WIDTH)).transpose(1, 2)
        q, k = foci.rotary(heads).chunk(2, dim=1)
        _, weights = foci.attention(q, k, k, mask=foci.causal, return_weights=True)
        return weights.mean("heads")


def read_layer(model: nn.Module, layer: int, tokens: Tensor) -> tuple[Tensor, foci.Weights]:
    """The input (B, T, D) of a layer's attention, and its weights (B, H, T, T), for tokens (B, T)."""
    inputs: list[Tensor] = []
    hook = model.blocks[layer].attention.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    with foci.watch(model) as seen, torch.no_grad():
        model(tokens)
    hook.remove()
    return inputs[0], list(seen.layers.values())[layer].weights


def measure_share(indexer: Indexer, x: Tensor, layer: foci.Weights) -> float:
    """The attention on the indexer's keys over that on the heaviest keys, the mean over queries with a choice."""
    mean = layer.mean("heads")
    with torch.no_grad():
        chosen = indexer(x).top(CHOSEN).keys[:, CHOSEN:]
    # (B, T, T), which is small here; one could also ask for the rows of some queries.
    rows = mean[..., CHOSEN:, :]
    share = rows.gather(-1, chosen).sum(-1) / rows.topk(CHOSEN).values.sum(-1)
    return share.mean().item()


def draw(tokens: Tensor, batch: int) -> Tensor:
    starts = torch.randint(len(tokens) - LENGTH, (batch, 1))
    return tokens[starts + torch.arange(LENGTH)]


def train(model: nn.Module, layer: int, tokens: Tensor, steps: int, batch: int) -> float:
    """Trains an indexer of a layer, prints the curve, and returns the share at the end."""
    split = int(len(tokens) * (1 - HELD_OUT))
    torch.manual_seed(0)
    held_out = read_layer(model, layer, draw(tokens[split:], 4))
    indexer = Indexer(held_out[0].shape[-1])
    optimizer = torch.optim.AdamW(indexer.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps, pct_start=0.1)
    del model.blocks[layer + 1 :]  # not needed
    print(f"{CHOSEN} of {LENGTH} keys before training: {measure_share(indexer, *held_out):.1%} of the best")
    share = 0.0
    for step in range(1, steps + 1):
        x, weights = read_layer(model, layer, draw(tokens[:split], batch))
        loss = foci.losses.divergence(weights.mean("heads"), indexer(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(steps // 10, 1) == 0:
            share = measure_share(indexer, *held_out)
            print(f"step {step:4}  divergence {loss.item():.3f}  {share:.1%} of the best {CHOSEN} keys", flush=True)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file of the kind that the model was trained on")
    parser.add_argument("--model", help="a run directory of foci train generation (default: the model of foci)")
    parser.add_argument("--layer", type=int, help="from 0 on (default: the last)")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=4, help=f"pieces of {LENGTH} tokens per step")
    options = parser.parse_args()
    found = foci.load(options.model) if options.model else foci.pretrained("generation")
    last = len(found.model.blocks) - 1
    layer = last if options.layer is None else options.layer
    if not 0 <= layer <= last:
        parser.error(f"--layer must be from 0 to {last}, got {layer}")
    tokens = torch.tensor(found.task.tokenizer.encode(options.text.read_text(encoding="utf-8")))
    if len(tokens) < 20 * LENGTH:
        parser.error(f"text must have at least {20 * LENGTH:,} tokens, got {len(tokens):,}")
    train(found.model.eval(), layer, tokens, options.steps, options.batch)


if __name__ == "__main__":
    main()
