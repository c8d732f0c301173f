import io
import itertools

import pytest

from foci.view.colors import (
    DARK_RAMP,
    LIGHT_RAMP,
    ansi_color_codes,
    compute_lightness,
    contrasting_text_color,
    detect_color_depth,
    has_light_background,
    interpolate_color,
    nearest_palette_index,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "bits"),
    [({}, 8), ({"COLORTERM": "truecolor"}, 24), ({"COLORTERM": "24bit", "NO_COLOR": "1"}, 0), ({"TERM": "dumb"}, 0)],
)
def test_depth(environment: dict[str, str], bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert detect_color_depth(Terminal()) == bits
    assert detect_color_depth(io.StringIO()) == 0


@pytest.mark.parametrize(("said", "light"), [("0;15", True), ("0;default;7", True), ("15;0", False), ("", False)])
def test_the_background_is_dark_unless_the_terminal_reports_a_light_one(
    said: str, light: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORFGBG", said)
    assert has_light_background() == light


@pytest.mark.parametrize("ramp", [LIGHT_RAMP, tuple(reversed(DARK_RAMP))])
def test_lightness_of_ramps_is_monotonic(ramp: tuple[tuple[int, int, int], ...]) -> None:
    steps = [compute_lightness(interpolate_color(ramp, i / 64)) for i in range(65)]
    assert all(before > after for before, after in itertools.pairwise(steps))
    assert steps[0] - steps[-1] > 0.8


@pytest.mark.parametrize("ramp", [LIGHT_RAMP, DARK_RAMP])
def test_text_color_contrasts_with_every_step(ramp: tuple[tuple[int, int, int], ...]) -> None:
    grounds = [interpolate_color(ramp, i / 64) for i in range(65)]
    assert (
        min(abs(compute_lightness(ground) - compute_lightness(contrasting_text_color(ground))) for ground in grounds)
        > 0.4
    )


def test_ansi_color_codes() -> None:
    assert ansi_color_codes((1, 2, 3), 24, background=True) == "48;2;1;2;3"
    assert ansi_color_codes((255, 0, 0), 8, background=False) == "38;5;196"
    assert [nearest_palette_index((g, g, g)) for g in (0, 8, 128, 255)] == [16, 232, 244, 231]
    assert interpolate_color(LIGHT_RAMP, -1) == LIGHT_RAMP[0]
    assert interpolate_color(LIGHT_RAMP, 2) == LIGHT_RAMP[-1]
