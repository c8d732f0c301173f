"""Vision models under `foci.watch`: the grid of patches, class token and registers, and the picture in one line."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foci
from foci.capture.windows import Windows
from foci.record.layer import Layer
from foci.record.window_weights import WindowWeights

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
FAMILIES = {
    "ViT": ({}, ["class token"]),
    "DeiT": ({}, ["class token", "distillation token"]),
    "Dinov2": ({}, ["class token"]),
    "Dinov2WithRegisters": ({"num_register_tokens": 2}, ["class token", "register 1", "register 2"]),
    "DINOv3ViT": ({"num_register_tokens": 2}, ["class token", "register 1", "register 2"]),
    "Beit": ({}, ["class token"]),
    "CLIPVision": ({}, ["class token"]),
    "SiglipVision": ({}, []),
}


def draw(marked: bool = False) -> Tensor:
    """(1, 3, 16, 16): brighter to the lower right; marked, with a spot in the patch 1,2 of 4 x 4."""
    picture = (torch.linspace(0, 0.5, 16)[:, None] + torch.linspace(0, 0.5, 16)).expand(1, 3, -1, -1).clone()
    if marked:
        picture[:, :, 5:7, 9:11] += 1
    return picture


def record(model: nn.Module, picture: Tensor) -> foci.Record:
    with foci.watch(model) as seen, torch.no_grad():
        model(picture)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family: str) -> None:
    options, extra = FAMILIES[family]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}Model")(config).eval()
    with torch.no_grad():
        expected = model(draw()).last_hidden_state
        with foci.watch(model) as seen:
            out = model(draw()).last_hidden_state
        model.set_attn_implementation("eager")
        eager = model(draw(), output_attentions=True).attentions
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert seen.unseen == []
    labels = seen.labels["patches"]
    assert labels.grid == (4, 4)
    assert labels.texts[0] == (*extra, *(f"{row},{column}" for row in range(4) for column in range(4)))
    first = len(extra)
    for index, weights in enumerate(eager):
        found = seen.image_map("2,1", layer=f"L{index}", head=1)
        exact = weights[0, 1, first + 9, first:].view(4, 4)
        torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-5)
    assert_orientation(model, seen.layers[next(iter(seen.layers))].name, first)


def assert_orientation(model: nn.Module, layer: str, first: int) -> None:
    """The values of the marked patch change most."""
    plain, marked = (record(model, draw(is_marked)).layers[layer].values for is_marked in (False, True))
    assert plain is not None
    assert marked is not None
    change = (plain - marked).norm(dim=-1).mean((0, 1))[first:]
    assert divmod(int(change.argmax()), 4) == (1, 2)


class Vit(nn.Module):
    """A vision transformer in plain PyTorch, as torchvision and timm have it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), 2)

    def forward(self, images: Tensor) -> Tensor:
        states = self.patches(images).flatten(2).mT
        return self.layers(torch.cat([self.token.expand(len(images), -1, -1), states], 1))


def test_a_grid_is_found_from_the_convolution_that_cuts_patches() -> None:
    torch.manual_seed(0)
    model = Vit().eval()
    seen = record(model, draw())
    labels = seen.labels["input"]
    assert (labels.grid, labels.leading, labels.texts[0][:2]) == ((4, 4), 1, ("class token", "0,0"))
    assert labels.images is not None
    assert torch.equal(labels.images[0], (draw()[0] * 255).round().byte().permute(1, 2, 0))
    assert_orientation(model, next(iter(seen.layers)), 1)
    # A batch is labelled too, and images that are not square.
    assert record(model, torch.rand(2, 3, 8, 24)).labels["input"].grid == (2, 6)


def test_the_vision_transformer_of_foci_has_a_grid() -> None:
    model = foci.nn.VisionTransformer.from_name("tiny", classes=10, registers=2).eval()
    labels = record(model, torch.rand(2, 3, 32, 32)).labels["input"]
    assert (labels.grid, labels.leading, labels.batch) == ((8, 8), 3, 2)


def test_show_draws_an_image_in_one_line() -> None:
    seen = record(Vit().eval(), draw())
    out = io.StringIO()
    seen.show(torch.zeros(32, 32, 3, dtype=torch.uint8), file=out)
    assert "Attention of the class token" in out.getvalue()
    images = seen.labels["input"].images
    assert images is not None
    assert images.shape == (1, 32, 32, 3)
    with pytest.raises(ValueError, match=r"image must have the proportions of 4 x 4 patches, got 20 x 32 pixels"):
        seen.show(torch.zeros(20, 32, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="image must have one picture for each of 1 sequences, got 2"):
        seen.show(torch.zeros(2, 8, 8, 3, dtype=torch.uint8))
    without = foci.Record.from_tensors([torch.eye(3).view(1, 1, 3, 3)])
    with pytest.raises(ValueError, match=r"got one without: give the grid with seen.label\(foci.Labels.patches"):
        without.show(torch.zeros(8, 8, 3))


def test_an_overlay_without_a_grid_says_how_to_give_one() -> None:
    plots = pytest.importorskip("foci.view.figures.plots")
    without = foci.Record.from_tensors([torch.eye(3).view(1, 1, 3, 3)], foci.Labels("patches", (("a", "b", "c"),)))
    with pytest.raises(ValueError, match=r"seen.label\(foci.Labels.patches\(rows, columns, image=image, extra=1\)\)"):
        plots.plot_overlay(without, "L0H0", patch=0)


def test_a_pooling_head_attends_to_the_patches() -> None:
    transformers.logging.set_verbosity_error()
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SIZES)).eval()
    head = record(model, draw())["cross.L0"]
    assert (head.queries, head.keys, head.shape[2:]) == ("queries", "patches", (1, 16))


SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}


@pytest.mark.parametrize("size", [(32, 32), (40, 56)], ids=str)
def test_the_windows_of_swin_are_put_back_on_the_grid(size: tuple[int, int]) -> None:
    """The maps equal those of the windows that the model cuts itself; also where its grid is padded."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.SwinModel(transformers.SwinConfig(**SWIN)).eval()
    picture = torch.rand(2, 3, *size)
    with torch.no_grad():
        expected = model(picture).last_hidden_state
        with foci.watch(model) as seen:
            out = model(picture).last_hidden_state
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    rows, columns = size[0] // 4, size[1] // 4
    assert [layer.shape for layer in seen.layers.values()][:2] == [(2, 2, rows * columns, rows * columns)] * 2
    labels = seen.labels[f"patches {rows}x{columns}"]
    assert (labels.grid, labels.batch, f"patches {rows // 2}x{columns // 2}" in seen.labels) == (
        (rows, columns),
        2,
        True,
    )
    assert labels.images is not None
    # The layer reads its windows from a grid: with the number of each patch as its input, they tell where they are.
    block = model.encoder.layers[0].blocks[1]
    numbers = torch.arange(1.0, rows * columns + 1).view(1, rows, columns, 1)
    swin = transformers.models.swin.modeling_swin
    padded, _ = block.maybe_pad(numbers, rows, columns)
    windows = swin.window_partition(block.cyclic_shift(padded), block.window_size).flatten(1).long() - 1
    model.set_attn_implementation("eager")
    with torch.no_grad():
        # Of each stage, the last layer.
        eager = model(picture, output_attentions=True).attentions[0]
    eager = eager.unflatten(0, (2, len(windows)))[1]
    patch = 1 * columns + 2
    number = int((windows == patch).any(1).nonzero()[0, 0])
    exact = torch.zeros(rows * columns)
    row = eager[number, 1, int((windows[number] == patch).nonzero()[0, 0])]
    exact[windows[number][windows[number] >= 0]] = row[windows[number] >= 0]
    found = seen.image_map("1,2", layer=1, head=1, batch=1)
    torch.testing.assert_close(found, exact.view(rows, columns), rtol=1e-3, atol=1e-5)


def test_window_weights_have_the_statistics_of_their_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    windows = Windows(5, 6, (4, 4), (2, 2)).find_positions()
    layer = Layer("x", windows=WindowWeights(torch.rand(2, 3, len(windows), 16, 16).softmax(-1), windows, 30))
    exact = Layer("x", matrix=layer.dense())
    questions: list[Callable[[Layer], Any]] = [
        lambda x: x.received(),
        lambda x: x.received([1, 7]),
        lambda x: x.distance(),
        lambda x: x.top(3).values,
        lambda x: x.top(3).keys,
        lambda x: x.picture(3, 5),
        lambda x: x.picture(3, 5, "max"),
        lambda x: x.grouped([(0, 4)], [(0, 2), (2, 30)]),
        lambda x: x[0, ..., 2, :],
        lambda x: x[..., [3, 8], :],
        lambda x: x.columns([1, 4]),
        lambda x: x @ torch.ones(30, 2),
        lambda x: torch.ones(2, 30) @ x,
        lambda x: torch.arange(30.0) @ x,
        lambda x: x.mean("heads")[1, 3],
    ]
    for ask in questions:
        torch.testing.assert_close(ask(layer), ask(exact))
        if ask is not questions[-1]:
            parts = [part.head(2) for part in (layer, exact)] if ask is not questions[8] else (layer, exact)
            torch.testing.assert_close(ask(parts[0]), ask(parts[1]))
    # The weights on padding count for the entropy, but have no place on the grid.
    assert bool((layer.entropy() >= exact.entropy() - 1e-5).all())
    foci.Record({"x": layer}, {"input": foci.Labels.patches(5, 6)}).save(tmp_path / "a.foci")
    torch.testing.assert_close(foci.load(tmp_path / "a.foci")["L0"].dense(), layer.dense())


def test_models_that_compute_their_own_softmax_are_listed_as_unseen() -> None:
    transformers.logging.set_verbosity_error()
    model = transformers.Swinv2Model(transformers.Swinv2Config(**SWIN)).eval()
    with pytest.warns(UserWarning, match="could not record 4 of the 4 attention modules of Swinv2Model"):
        seen = record(model, torch.rand(1, 3, 32, 32))
    assert len(seen.unseen) == 4
    assert seen.layers == {}


def test_torchvision() -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed: see CONTRIBUTING.md")
    model = torchvision.models.VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=32
    )
    seen = record(model.eval(), draw())
    assert (seen.labels["input"].grid, seen.labels["input"].leading, seen.unseen) == ((4, 4), 1, [])
    assert seen.image_map("class token").shape == (4, 4)
    inputs: list[Tensor] = []
    modules = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    for module in modules:
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(draw())
        for number, (module, x) in enumerate(zip(modules, [*inputs], strict=True)):
            exact = module(x, x, x, need_weights=True, average_attn_weights=False)[1]
            found = seen.image_map("class token", layer=number, head="each")
            torch.testing.assert_close(found, exact[0, :, 0, 1:].unflatten(-1, (4, 4)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "leading"),
    [("vit_tiny_patch16_224", 1), ("vit_small_patch14_reg4_dinov2", 5), ("deit_tiny_distilled_patch16_224", 2)],
)
def test_timm(name: str, leading: int) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: see CONTRIBUTING.md")
    model = timm.create_model(name, img_size=112, depth=2).eval()
    picture = torch.rand(1, 3, 112, 112)
    seen = record(model, picture)
    side = 112 // model.patch_embed.patch_size[0]
    assert (seen.labels["input"].grid, seen.labels["input"].leading) == ((side, side), leading)
    timm.layers.set_fused_attn(False)
    try:
        plain = timm.create_model(name, img_size=112, depth=2).eval()
    finally:
        timm.layers.set_fused_attn(True)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        exact = list(timm.utils.AttentionExtract(plain)(picture).values())[-1]
    found = seen.image_map("class token", layer=1, head="each")
    torch.testing.assert_close(found, exact[0, :, 0, leading:].unflatten(-1, (side, side)), rtol=1e-3, atol=1e-5)


def test_timm_maxvit_attends_in_blocks_and_in_grids() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: see CONTRIBUTING.md")
    model, picture = timm.create_model("maxvit_pico_rw_256", img_size=128).eval(), torch.rand(1, 3, 128, 128)
    seen = record(model, picture)
    assert seen.unseen == []
    block, grid = list(seen.layers.values())[:2]
    assert block.shape == grid.shape == (1, 1, 32 * 32, 32 * 32)
    assert block.name.endswith("attn_block.attn")
    # A window of 4 x 4 patches lies together in a block, and 8 patches apart in a grid.
    for layer, rows in ((block, [0, 1, 2, 3]), (grid, [0, 8, 16, 24])):
        found = seen.image_map("0,0", layer=layer.name)
        assert found.nonzero().tolist() == [[row, column] for row in rows for column in rows]
    # The weights of all windows equal those that timm computes itself.
    exact: list[Tensor] = []
    for name, module in model.named_modules():
        if name in seen.layers:
            module.fused_attn = False
            module.attn_drop.register_forward_pre_hook(lambda _, args: exact.append(args[0]))
    with torch.no_grad():
        model(picture)
    for layer, weights in zip(seen.layers.values(), exact, strict=True):
        windows = layer.windows
        assert windows is not None
        expected = weights.unflatten(0, (1, len(windows.positions))).transpose(1, 2)
        torch.testing.assert_close(windows.windows, expected, rtol=1e-3, atol=1e-5)


def test_timm_swin_with_fused_attention() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: see CONTRIBUTING.md")
    sizes: dict[str, Any] = {"img_size": 64, "window_size": 4, "depths": (2, 2), "embed_dim": 16, "num_heads": (2, 2)}
    timm.layers.set_fused_attn(True, experimental=True)
    try:
        model = timm.create_model("swin_tiny_patch4_window7_224", **sizes).eval()
    finally:
        timm.layers.set_fused_attn(True)
    seen = record(model, torch.rand(1, 3, 64, 64))
    assert seen["L1"].shape == (1, 2, 256, 256)
    found = seen.image_map("0,0", layer="L1")
    # The shifted window of the first patch has only its own corner of 2 x 2.
    assert (found > 1e-6).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    # Without fused attention, timm computes its own softmax.
    plain = timm.create_model("swin_tiny_patch4_window7_224", **sizes).eval()
    assert all("own softmax" in line for line in record(plain, torch.rand(1, 3, 64, 64)).unseen)


def test_labels_of_an_unknown_model_are_given_by_hand() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.rand(1, 8, 8)
    segment = foci.Segment("patches", start=2, rows=2, columns=2)
    mixed = foci.Labels.tokens([["What", " is", *["<i>"] * 4, " it", "?"]]).with_segments([segment])
    for labels in (mixed, {"input": mixed}):
        with foci.watch(model, labels=labels) as seen, torch.no_grad():
            _, weights = model(x, x, x)
        torch.testing.assert_close(seen.image_map("it"), weights[0, 6, 2:6].view(2, 2))
    misfit = r"'input' must have 8 positions, as .* has, got 5 x 5 patches"
    grid = foci.Labels.patches(5, 5)
    with pytest.raises(ValueError, match=misfit), foci.watch(model, labels=grid) as seen, torch.no_grad():
        model(x, x, x)
    with pytest.raises(ValueError, match=misfit):
        seen.image_map("0,0")
    with pytest.raises(TypeError, match=r"labels must be foci.Labels, or a dict of them .*, got \['a'\]"):
        foci.watch(model, labels=["a"]).__enter__()  # type: ignore[arg-type]
