"""The Vision Transformer: patches, positions, padding, stem, training, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import foci.nn
from foci.nn.vision import StandardConv2d, VisionConfig, VisionTransformer, split_patches
from tests.nn.same import assert_same

OPTIONS = [
    {"pool": pool, "positions": positions, "registers": registers}
    for pool in ("class", "mean")
    for positions in ("learned", "sinusoidal")
    for registers in (0, 2)
]


def small(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    given: dict[str, Any] = {"width": 16, "layers": 2, "heads": 2, "image": 8, "patch": 2, "channels": 1, "classes": 4}
    return VisionTransformer(VisionConfig(**given | options)).eval()


def images(count: int, height: int = 8, width: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 1, height, width, generator=torch.Generator().manual_seed(seed))


def name_options(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("options", OPTIONS, ids=name_options)
def test_shapes_and_gradients(options: dict[str, Any]) -> None:
    model = small(**options).train()
    out = model(images(3), return_weights=True)
    assert model.leading == options["registers"] + (options["pool"] == "class")
    assert out.logits.shape == (3, 4)
    assert out.states.shape == (3, model.leading + 16, 16)
    assert [weights.shape for weights in out.weights.values()] == [(3, 2, model.leading + 16, model.leading + 16)] * 2
    out.logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())] == []


def test_patches_are_cut_row_by_row() -> None:
    image = torch.arange(16).view(1, 1, 4, 4)
    assert split_patches(image, 2).tolist() == [[[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]]
    both = torch.stack([image[0, 0], -image[0, 0]])[None]
    assert split_patches(both, 2)[0, 1].tolist() == [2, 3, 6, 7, -2, -3, -6, -7]


@pytest.mark.parametrize("options", OPTIONS, ids=name_options)
def test_a_padded_image_equals_the_unpadded_image(options: dict[str, Any]) -> None:
    model = small(**options)
    if options["positions"] == "learned":
        # A smaller image would get an interpolated table; the comparison needs the corner of the full one.
        model.places.data[:] = foci.sinusoidal(4, 16)[:, None] + foci.sinusoidal(4, 16)
    picture = images(1, 4, 6)
    large = torch.randn(2, 1, 8, 8)
    large[0, :, :4, :6] = picture
    real = torch.zeros(2, 4, 4, dtype=torch.bool)
    real[0, :2, :3], real[1] = True, True
    alone = small(**options)
    alone.load_state_dict(model.state_dict())
    if options["positions"] == "learned":
        alone._get_positions = lambda rows, columns: model.places[:rows, :columns]  # type: ignore[method-assign]
    assert_same(model(large, padding=real).logits[0], alone(picture).logits[0])
    assert_same(model(large, padding=real).logits[1], model(large[1:]).logits[0])


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_the_position_of_a_patch_matters(positions: str) -> None:
    """Without positions, the class token could not distinguish an image from a permutation of its patches."""
    model = small(positions=positions)
    if positions == "learned":
        model.places.data.normal_()
    image = images(1)
    moved = image.roll(2, dims=-1)
    assert float((model(image).logits - model(moved).logits).detach().abs().max()) > 1e-4


def test_images_of_another_size() -> None:
    for positions in ("learned", "sinusoidal"):
        model = small(positions=positions)
        assert model(images(2, 12, 16)).states.shape == (2, 1 + 48, 16)
    flat = small()
    flat.places.data[:] = 3.0
    assert_same(flat._get_positions(6, 8), torch.full((6, 8, 16), 3.0))


def test_learns_the_row_of_a_bright_patch() -> None:
    """One bright patch in noise: which of the four rows is it in?"""
    torch.manual_seed(0)
    model = small(width=32, layers=2, registers=1)
    # Larger position vectors than at initialization: a hundred steps are then enough.
    model.places.data.normal_(std=0.2)

    def lit(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(4, (count, 2), generator=generator)
        light = F.one_hot(places[:, 0] * 4 + places[:, 1], 16).view(count, 1, 4, 4).float()
        noise = torch.randn(count, 1, 8, 8, generator=generator)
        return noise * 0.3 + 2 * F.interpolate(light, (8, 8)), places[:, 0]

    unseen, rows = lit(128, seed=10**6)
    assert float((model(unseen).logits.argmax(-1) == rows).float().mean()) < 0.6
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(120):
        pictures, labels = lit(64, seed=step)
        loss = F.cross_entropy(model(pictures).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float((model(unseen).logits.argmax(-1) == rows).float().mean()) > 0.9


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compiles_into_one_graph() -> None:
    model = small(registers=2, layers=1)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(fast(images(2)).logits, model(images(2)).logits)
    fast(images(2)).logits.sum().backward()


def test_runs_in_bfloat16_and_with_checkpointing() -> None:
    expected = small()(images(3)).logits.detach()
    half = small().to(torch.bfloat16)(images(3).to(torch.bfloat16)).logits
    half.float().sum().backward()
    assert half.dtype == torch.bfloat16
    assert float((half.detach() - expected).abs().max()) < 0.05
    assert_same(small(checkpoint=True)(images(3)).logits, expected)


def test_saves_and_loads(tmp_path: Path) -> None:
    for options in (OPTIONS[3], OPTIONS[4]):
        model = small(**options)
        model.save(tmp_path / "vision.safetensors")
        again = foci.nn.Model.load(tmp_path / "vision.safetensors")
        assert isinstance(again, VisionTransformer)
        assert again.config == model.config
        assert bool((again(images(2)).logits == model(images(2)).logits).all())


def test_named_sizes() -> None:
    with torch.device("meta"):
        base = VisionTransformer.from_name("base", classes=1000)
    # ViT-B/16 without the position of its class token, which is part of the learned token here.
    assert sum(p.numel() for p in base.parameters()) == 86_567_656 - 768
    assert small(classes=None)(images(1)).logits is None


def test_wrong_options_and_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="image must be a multiple of patch=2, got 9"):
        small(image=9)
    with pytest.raises(ValueError, match="width must be a multiple of 4 for sinusoidal positions in 2-D, got 18"):
        small(positions="sinusoidal", width=18)
    with pytest.raises(ValueError, match=r"\(B, 1, height, width\), both sizes multiples of 2, got \(1, 3, 8, 8\)"):
        small()(torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"padding must be bool \(B, 4, 4\)"):
        small()(images(1), padding=torch.ones(1, 16, dtype=torch.bool))


def test_a_stem_crosses_patch_borders_and_refuses_padding() -> None:
    model = small(stem=2, stem_width=8)
    image = images(1)
    changed = image.clone()
    changed[0, 0, 0, 0] += 1.0
    plain = small()
    inputs = [split_patches(image, 2), split_patches(changed, 2)]
    assert model(image).logits.shape == (1, 4)
    assert model.stem is not None
    assert plain.stem is None
    assert torch.equal(inputs[0][0, 1], inputs[1][0, 1])
    assert not torch.equal(split_patches(model.stem(image), 2)[0, 1], split_patches(model.stem(changed), 2)[0, 1])
    with pytest.raises(ValueError, match="padding must be None with a stem"):
        model(image, padding=torch.ones(1, 4, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    ("stem", "pool", "widths", "pools"),
    [(2, 1, [4, 4], [1]), (2, 2, [4, 8], [0, 1]), (4, 2, [4, 4, 8, 8], [1, 3]), (3, 2, [4, 4, 8], [1, 2])],
)
def test_a_stem_with_pooling_keeps_the_grid(stem: int, pool: int, widths: list[int], pools: list[int]) -> None:
    model = small(stem=stem, stem_width=4, stem_pool=pool, patch=4, pool="mean")
    assert model.stem is not None
    kinds = [type(part).__name__ for part in model.stem if not isinstance(part, torch.nn.GroupNorm | torch.nn.GELU)]
    assert [i - kinds[:i].count("MaxPool2d") - 1 for i, kind in enumerate(kinds) if kind == "MaxPool2d"] == pools
    assert [part.out_channels for part in model.stem if isinstance(part, torch.nn.Conv2d)] == widths
    assert model.stem(images(1)).shape == (1, widths[-1], 8 // 2**pool, 8 // 2**pool)
    assert model.grid(8, 8) == (2, 2)
    out = model(images(3, 8, 12), return_weights=True)
    assert out.logits.shape == (3, 4)
    assert out.weights["L1"].shape == (3, 2, 6, 6)


def test_a_stem_does_not_shift_the_image() -> None:
    """Pooling must not shift the patches."""
    model = small(image=48, patch=4, stem=4, stem_width=8, stem_pool=2)
    assert model.stem is not None
    dark = model.stem(torch.zeros(1, 1, 48, 48))
    for row, column in ((3, 3), (3, 8), (7, 4)):
        light = torch.zeros(1, 1, 48, 48)
        light[0, 0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 5.0
        felt = (model.stem(light) - dark).detach().square().sum(1)[0]
        places = torch.arange(12.0)
        assert abs(float((felt.sum(1) * places).sum() / felt.sum()) - row) < 0.6
        assert abs(float((felt.sum(0) * places).sum() / felt.sum()) - column) < 0.6


def test_stem_filters_are_standardized() -> None:
    layer = StandardConv2d(3, 5, 3, padding=1, bias=False)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    filters = (layer.weight - layer.weight.mean((1, 2, 3), keepdim=True)).detach()
    filters /= (filters.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
    assert_same(layer(x), F.conv2d(x, filters, padding=1))


def test_invalid_stem_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="stem_pool must be at most stem=1, got 2"):
        small(stem=1, stem_pool=2, patch=4)
    with pytest.raises(ValueError, match="patch must be a multiple of 4 pixels with stem_pool=2, got 2"):
        small(stem=2, stem_pool=2, patch=2)
