"""Changes of pictures: drawn from a generator, picture by picture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foci.inputs import image_augmentation as changes


def seeded(number: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(number)


IMAGES = torch.rand(64, 2, 8, 8, generator=seeded())

CHANGES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "flipped": lambda g: changes.random_flip(IMAGES, g),
    "cropped": lambda g: changes.random_shift(IMAGES, 2, g),
    "turned": lambda g: changes.random_rotation(IMAGES, 10.0, 0.1, g),
    "erased": lambda g: changes.random_erase(IMAGES, 0.5, g),
    "mixed": lambda g: changes.mixup_or_cutmix(IMAGES, 1.0, g)[0],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_results_depend_only_on_the_generator(change: Callable[[torch.Generator], Tensor]) -> None:
    assert change(seeded(3)).shape == IMAGES.shape
    assert torch.equal(change(seeded(3)), change(seeded(3)))
    assert not torch.equal(change(seeded(3)), change(seeded(4)))


def test_about_half_of_the_images_are_flipped() -> None:
    found = changes.random_flip(IMAGES, seeded())
    same, turned = (found == IMAGES).flatten(1).all(1), (found == IMAGES.flip(-1)).flatten(1).all(1)
    assert bool((same ^ turned).all())
    assert 16 < int(turned.sum()) < 48


def test_a_shift_moves_the_image() -> None:
    dot = torch.zeros(200, 1, 9, 9)
    dot[:, :, 4, 4] = 1.0
    found = changes.random_shift(dot, 2, seeded())
    assert bool((found.flatten(1).sum(1) == 1).all())
    places = {divmod(int(each.argmax()), 9) for each in found}
    assert places == {(row, column) for row in range(2, 7) for column in range(2, 7)}


def test_a_rotation_by_zero_changes_nothing() -> None:
    assert torch.allclose(changes.random_rotation(IMAGES, 0.0, 0.0, seeded()), IMAGES, atol=1e-5)


def test_boxes_cover_the_given_area() -> None:
    areas = torch.full((4000,), 0.25)
    covered = changes.random_boxes(4000, 32, 32, areas, seeded()).flatten(1).float().mean(1)
    assert 0.15 < float(covered.mean()) < 0.25
    assert float(covered.max()) < 0.3


def test_erasing_keeps_the_rest() -> None:
    found = changes.random_erase(IMAGES, 0.5, seeded())
    touched = (found != IMAGES).flatten(1).any(1)
    assert 16 < int(touched.sum()) < 48
    assert float((found != IMAGES).float().mean()) < 0.3
    assert torch.equal(changes.random_erase(IMAGES, 0.0, seeded()), IMAGES)


@pytest.mark.parametrize("seed", range(6))
def test_mixing_returns_the_fraction_of_the_own_image(seed: int) -> None:
    """Pictures of one number each, so that the mean of a mixture tells its parts."""
    plain = torch.arange(64.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    found, other, own = changes.mixup_or_cutmix(plain, 1.0, seeded(seed))
    wanted = own * torch.arange(64.0) + (1 - own) * other
    assert torch.allclose(found.mean((1, 2, 3)), wanted, atol=1e-4)
    assert float(own.min()) < 0.9


def test_probability_zero_mixes_nothing() -> None:
    found, _, own = changes.mixup_or_cutmix(IMAGES, 0.0, seeded())
    assert torch.equal(found, IMAGES)
    assert bool((own == 1).all())


@pytest.mark.parametrize(("strength", "spread"), [(1.0, 1 / 12), (0.5, 1 / 8)])
def test_beta_has_the_known_mean_and_variance(strength: float, spread: float) -> None:
    """The variance is 1 / (4 (2 strength + 1))."""
    found = changes.sample_beta(strength, 20_000, seeded())
    assert found.shape == (20_000,)
    assert float(found.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(found.var()) == pytest.approx(spread, abs=0.003)
