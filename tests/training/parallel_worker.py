"""What one process of test_parallel checks: parallel models give the gradients and the weights of whole ones.

Usage: python -m tests.training.parallel_worker fsdp=2,tp=2
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import foci
from foci.training.parallel import parallelize_model, parse_parallel

B, T, S = 4, 9, 13


def models() -> dict[str, tuple[foci.nn.Model, Any]]:
    """Models with every kind of part, and the function that runs each on some rows of a batch."""
    tokens = torch.randint(50, (B, T), generator=torch.Generator().manual_seed(1))
    source = torch.randint(50, (B, S), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([9, 4, 1, 7])
    documents = torch.tensor([[0] * 4 + [1] * 5] * B)
    base: dict[str, Any] = {"width": 32, "layers": 2, "heads": 4, "dropout": 0.0, "vocabulary": 50, "max_length": 64}
    return {
        "decoder": (
            foci.nn.Decoder.from_name("tiny", **base | {"kv_heads": 2, "rotary": 100.0, "activation": "swiglu"}),
            lambda model, rows: model(tokens[rows], documents=documents[rows]).logits,
        ),
        "recomputed": (
            foci.nn.Decoder.from_name("tiny", **base | {"bias": "buckets", "norm": "rms", "checkpoint": True}),
            lambda model, rows: model(tokens[rows]).logits,
        ),
        "encoder": (
            foci.nn.Encoder.from_name("tiny", **base | {"bias": "alibi", "score": "additive", "norm_first": False}),
            lambda model, rows: model(tokens[rows], padding=lengths[rows]).states,
        ),
        "relative": (
            foci.nn.Encoder.from_name("tiny", **base | {"bias": "relative", "score": "cosine"}),
            lambda model, rows: model(tokens[rows]).states,
        ),
        "encoder-decoder": (
            foci.nn.EncoderDecoder.from_name("tiny", **base | {"shared": True}),
            lambda model, rows: model(source[rows], tokens[rows], target_padding=lengths[rows]).logits,
        ),
        "classifier": (
            foci.nn.TextClassifier.from_name(
                "tiny", vocabulary=50, classes=3, width=32, layers=1, heads=2, dropout=0.0, head_dropout=0.0
            ),
            lambda model, rows: model(tokens[rows], padding=lengths[rows]).logits,
        ),
    }


def sum_loss(out: Tensor, rows: slice) -> Tensor:
    """A sum over the rows of a batch, so that the losses of its parts add up."""
    factors = torch.randn(B, *out.shape[1:], generator=torch.Generator().manual_seed(3))
    return (out.float() * factors[rows]).sum()


def check_model(name: str, sizes: str) -> None:
    torch.manual_seed(5)
    whole, run = models()[name]
    torch.manual_seed(5)
    model, _ = models()[name]
    if name == "classifier":
        for each in (whole, model):
            torch.nn.init.ones_(each.head.weight)
    parallel = parse_parallel(sizes)
    orders = parallelize_model(model, parallel, torch.device("cpu"))
    rank = dist.get_rank() // (parallel.tp * parallel.cp)
    rows = slice(rank * B // parallel.fsdp, (rank + 1) * B // parallel.fsdp)
    expected, out = run(whole, slice(0, B)), run(model, rows)
    torch.testing.assert_close(out, expected[rows], rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")
    sum_loss(expected, slice(0, B)).backward()
    (sum_loss(out, rows) / parallel.cp).backward()
    found = dict(model.named_parameters())
    for key, parameter in whole.named_parameters():
        grad: Any = found[key].grad
        assert grad is not None, f"{name} {key}"
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        grad = grad[orders[key].argsort()] if key in orders else grad
        torch.testing.assert_close(
            grad, parameter.grad, rtol=1e-3, atol=1e-4, msg=lambda t, at=key: f"{name} {at}: {t}"
        )


def check_watching(sizes: str) -> None:
    """foci.watch sees all heads and tokens of a parallel model on every process."""
    torch.manual_seed(5)
    whole, run = models()["decoder"]
    torch.manual_seed(5)
    model, _ = models()["decoder"]
    parallelize_model(model, parse_parallel(sizes), torch.device("cpu"))
    records = []
    for each in (whole, model):
        with torch.no_grad(), foci.watch(each) as record:
            run(each, slice(0, B))
        records.append(record)
    for layer in ("L0", "L1"):
        expected, found = (record[layer].weights.dense() for record in records)
        assert found.shape == (B, 4, T, T)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def main(sizes: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for name in models():
        check_model(name, sizes)
    check_watching(sizes)
    print("passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
