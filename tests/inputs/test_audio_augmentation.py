"""Changes of sound: drawn from a generator, of the size that was asked for, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foci.inputs import audio_augmentation as changes


def seeded(number: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(number)


SOUND = torch.randn(2000, generator=seeded())
FRAMES = torch.randn(50, 20, generator=seeded())

CHANGES: dict[str, Callable[[torch.Generator], Tensor]] = {
    "change_speed": lambda g: changes.change_speed(SOUND, 0.3, g),
    "add_noise": lambda g: changes.add_noise(SOUND, (5.0, 20.0), g),
    "pad_or_trim": lambda g: changes.pad_or_trim(SOUND, 300, g),
    "stretch_time": lambda g: changes.stretch_time(FRAMES, 0.3, g),
    "warp_bands": lambda g: changes.warp_bands(FRAMES, 0.2, g),
    "tilt_spectrum": lambda g: changes.tilt_spectrum(FRAMES, 1.0, g),
    "spec_augment": lambda g: changes.spec_augment(FRAMES, generator=g),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_results_depend_only_on_the_generator(change: Callable[[torch.Generator], Tensor]) -> None:
    assert torch.equal(change(seeded(3)), change(seeded(3)))
    first, second = change(seeded(3)), change(seeded(4))
    assert first.shape != second.shape or not torch.equal(first, second)


def test_speed_stays_within_its_limit() -> None:
    lengths = [len(changes.change_speed(SOUND, 0.25, seeded(i))) for i in range(40)]
    assert 2000 / 1.25 - 1 <= min(lengths) < 1800
    assert 2200 < max(lengths) <= 2000 * 1.25 + 1
    assert changes.change_speed(SOUND, 0.0) is SOUND


def test_noise_has_the_given_level() -> None:
    for number in range(5):
        added = changes.add_noise(SOUND, (20.0, 20.0), seeded(number)) - SOUND
        ratio = (SOUND.square().mean() / added.square().mean()).log10() * 10
        assert float(ratio) == pytest.approx(20.0, abs=0.01)


def test_pink_noise_falls_with_frequency() -> None:
    spectrum = torch.fft.rfft(changes.to_pink_noise(torch.randn(8192, generator=seeded()))).abs().square()
    assert spectrum[10:100].mean() > 5 * spectrum[1000:4000].mean()


def test_a_shift_never_cuts_more_than_an_eighth() -> None:
    lengths = [len(changes.pad_or_trim(SOUND, 10_000, seeded(i))) for i in range(40)]
    assert min(lengths) >= 2000 - 2 * 250
    assert max(lengths) > 2000


def test_warping_moves_a_band() -> None:
    peak = torch.zeros(3, 40)
    peak[:, 20] = 1.0
    places = {int(changes.warp_bands(peak, 0.2, seeded(i))[0].argmax()) for i in range(30)}
    assert places >= {18, 20, 22}
    assert all(16 <= place <= 24 for place in places)
    assert torch.equal(changes.warp_bands(FRAMES, 0.0), FRAMES)


def test_tilt_is_equal_for_all_frames() -> None:
    added = changes.tilt_spectrum(FRAMES, 0.5, seeded(2)) - FRAMES
    assert torch.allclose(added, added[:1].expand_as(added), atol=1e-6)
    assert 0.05 < float(added.abs().max()) <= 0.5 + 1e-6


def test_spec_augment_masks_some_and_keeps_the_rest() -> None:
    found = changes.spec_augment(FRAMES, times=1, longest=10, share=1.0, bands=1, widest=4, generator=seeded(5))
    covered = found == FRAMES.mean()
    times, bands = covered.all(1).sum(), covered.all(0).sum()
    assert 0 < times <= 10
    assert 0 < bands <= 4
    assert torch.equal(found[~covered], FRAMES[~covered])
    assert torch.equal(changes.spec_augment(FRAMES, times=0, bands=0), FRAMES)


def test_a_time_mask_covers_at_most_its_share() -> None:
    short = torch.randn(10, 5, generator=seeded())
    for number in range(20):
        found = changes.spec_augment(short, times=1, longest=40, share=0.2, bands=0, generator=seeded(number))
        assert int((found != short).any(1).sum()) <= 2
