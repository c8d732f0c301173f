"""foci.clip_qk: the factors of MuonClip's rule on every supported attention, and refusals that change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foci
from tests.capture.models import Stack

TOKENS = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))


class Multihead(nn.Module):
    """One nn.MultiheadAttention; `options` are its own."""

    def __init__(self, kind: type[nn.MultiheadAttention], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attention = kind(16, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def build_transformers(kind: str, **options: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4}
    if kind == "GPT2":
        sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    for name, parameter in model.named_parameters():
        # Projections of transformers start with small weights and with biases of 0.
        if "attn" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def build_decoder(**options: Any) -> nn.Module:
    config = foci.nn.TransformerConfig(vocabulary=50, width=32, heads=4, layers=2, **options)
    return foci.nn.Decoder(config)


EQUAL_HEADS: dict[str, Callable[[], nn.Module]] = {
    "decoder": build_decoder,
    "rotary, no biases": lambda: build_decoder(rotary=10000.0, biases=False),
    "torch multihead": lambda: Multihead(nn.MultiheadAttention),
    "foci multihead": lambda: Multihead(foci.nn.MultiheadAttention, add_bias_kv=True),
    "torch multihead, separate": lambda: Multihead(nn.MultiheadAttention, kdim=16, vdim=16),
    "llama": lambda: build_transformers("Llama", num_key_value_heads=4),
    "qwen2": lambda: build_transformers("Qwen2", num_key_value_heads=4),
    "gpt2": lambda: build_transformers("GPT2"),
}
GROUPED_HEADS: dict[str, Callable[[], nn.Module]] = {
    "decoder": lambda: build_decoder(kv_heads=2),
    "llama": lambda: build_transformers("Llama", num_key_value_heads=2),
    "qwen2": lambda: build_transformers("Qwen2", num_key_value_heads=1),
}


def measure(model: nn.Module) -> dict[str, Tensor]:
    """The largest logit of each head, by layer."""
    monitor = foci.Monitor(model, alerts={})
    with monitor, torch.no_grad():
        model(TOKENS)
    monitor.log()
    return monitor.largest_logit


def first_call(model: nn.Module) -> tuple[Tensor, Tensor]:
    """The queries and keys of the first layer, (B, H, T, D) and (B, G, T, D)."""
    with foci.watch(model, layers=[0]) as seen, torch.no_grad():
        model(TOKENS)
    call = next(iter(seen.layers.values())).weights.call
    return call.q.clone(), call.k.clone()


@pytest.mark.parametrize("case", EQUAL_HEADS)
@pytest.mark.parametrize("alpha", [0.5, 0.25])
def test_queries_and_keys_follow_the_formula(case: str, alpha: float) -> None:
    torch.manual_seed(1)
    model = EQUAL_HEADS[case]().eval()
    logits = measure(model)
    tau = float(logits["L0"].sort().values[1]) * 0.999
    gamma = torch.where(logits["L0"] > tau, tau / logits["L0"], 1.0)
    assert (gamma < 1).sum() == 3
    q, k = first_call(model)
    found = foci.clip_qk(model, {"L0": logits["L0"]}, tau, alpha)
    assert found == pytest.approx({f"L0H{head}": gamma[head].item() for head in range(4) if gamma[head] < 1})
    clipped_q, clipped_k = first_call(model)
    torch.testing.assert_close(clipped_q, q * (gamma**alpha).view(-1, 1, 1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(clipped_k, k * (gamma ** (1 - alpha)).view(-1, 1, 1), rtol=1e-4, atol=1e-6)
    after = measure(model)
    torch.testing.assert_close(after["L0"], logits["L0"].clamp(max=tau), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", GROUPED_HEADS)
def test_grouped_heads_change_their_queries_only(case: str) -> None:
    torch.manual_seed(1)
    model = GROUPED_HEADS[case]().eval()
    logits = measure(model)
    tau = float(logits["L0"].median()) * 0.999
    gamma = torch.where(logits["L0"] > tau, tau / logits["L0"], 1.0)
    q, k = first_call(model)
    foci.clip_qk(model, {"L0": logits["L0"]}, tau)
    clipped_q, clipped_k = first_call(model)
    torch.testing.assert_close(clipped_q, q * gamma.view(-1, 1, 1), rtol=1e-4, atol=1e-6)
    assert torch.equal(clipped_k, k)


def test_all_layers_of_a_monitor() -> None:
    model = build_decoder()
    logits = measure(model)
    found = foci.clip_qk(model, logits, tau=1e-3)
    assert set(found) == {f"L{layer}H{head}" for layer in range(2) for head in range(4)}
    assert foci.clip_qk(model, logits, tau=1e6) == {}


def test_cross_attention_has_names_of_its_own() -> None:
    model = foci.nn.EncoderDecoder.from_name("tiny", vocabulary=50)
    cross = dict(model.named_modules())["decoder.blocks.1.cross"]
    assert isinstance(cross, foci.nn.Attention)
    before = cross.project.weight.detach().clone()
    foci.clip_qk(model, {"cross.L1": [200.0] * cross.heads}, tau=100.0)
    width = cross.heads * cross.head_width
    torch.testing.assert_close(cross.project.weight[: 2 * width], before[: 2 * width] * 0.5**0.5)
    assert torch.equal(cross.project.weight[2 * width :], before[2 * width :])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: build_transformers("Qwen3", num_key_value_heads=4, head_dim=8),
            r"its QK-norm \(q_norm, k_norm\) undoes",
        ),
        (lambda: build_transformers("Bert"), "supported are foci.nn, and transformers' attentions"),
        (lambda: build_transformers("Gemma2", head_dim=8), "its logits have a softcap"),
        (lambda: build_decoder(score="cosine"), "its score is CosineScore, not a dot product"),
        (Stack, "supported are foci.nn"),
    ],
)
def test_other_attentions_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"L1 must be an attention that clip_qk supports, got \w+: {message}"):
        foci.clip_qk(model, {"L0": [1.0] * 4, "L1": [200.0] * 4}, tau=100.0)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("logits", "options", "message"),
    [
        ({"L7": [200.0] * 4}, {}, r"largest_logit must name layers of the model \(.*L0.*\), got 'L7'"),
        ({"L0": [float("nan")] * 4}, {}, "largest_logit must be finite"),
        ({"L0": [200.0] * 3}, {}, "largest_logit must have one number per head of L0, got 3"),
        ({}, {"tau": 0.0}, "tau must be a finite number above 0, got 0.0"),
        ({}, {"alpha": 2.0}, "alpha must be from 0 to 1, got 2.0"),
    ],
)
def test_wrong_arguments_are_refused(logits: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        foci.clip_qk(build_decoder(), logits, **{"tau": 100.0} | options)


def test_sharded_parameters(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = build_decoder()
    logits = measure(model)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=dist.init_device_mesh("cpu", (1,)))  # type: ignore[arg-type]
        foci.clip_qk(model, logits, tau=1e-3)
        found = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()
        }
    finally:
        dist.destroy_process_group()
    plain = build_decoder()
    plain.load_state_dict(expected)
    foci.clip_qk(plain, logits, tau=1e-3)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(found[name], tensor)
