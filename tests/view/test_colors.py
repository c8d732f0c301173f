import io
import itertools

import pytest

from foci.view.colors import ON_BLACK, ON_WHITE, codes, depth, ink, lightness, mixed, on_white, palette


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
    assert depth(Terminal()) == bits
    assert depth(io.StringIO()) == 0


@pytest.mark.parametrize(("said", "light"), [("0;15", True), ("0;default;7", True), ("15;0", False), ("", False)])
def test_the_ground_is_dark_unless_the_terminal_says_otherwise(
    said: str, light: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLORFGBG", said)
    assert on_white() == light


@pytest.mark.parametrize("ramp", [ON_WHITE, tuple(reversed(ON_BLACK))])
def test_more_is_further_from_the_ground_to_every_eye(ramp: tuple[tuple[int, int, int], ...]) -> None:
    steps = [lightness(mixed(ramp, i / 64)) for i in range(65)]
    assert all(before > after for before, after in itertools.pairwise(steps))
    assert steps[0] - steps[-1] > 0.8


@pytest.mark.parametrize("ramp", [ON_WHITE, ON_BLACK])
def test_letters_read_on_every_step(ramp: tuple[tuple[int, int, int], ...]) -> None:
    grounds = [mixed(ramp, i / 64) for i in range(65)]
    assert min(abs(lightness(ground) - lightness(ink(ground))) for ground in grounds) > 0.4


def test_codes() -> None:
    assert codes((1, 2, 3), 24, ground=True) == "48;2;1;2;3"
    assert codes((255, 0, 0), 8, ground=False) == "38;5;196"
    assert [palette((g, g, g)) for g in (0, 8, 128, 255)] == [16, 232, 244, 231]
    assert mixed(ON_WHITE, -1) == ON_WHITE[0]
    assert mixed(ON_WHITE, 2) == ON_WHITE[-1]
