import pytest
import torch

import foci
from foci.cli import doctor
from foci.runtime.console import TextPage, text_width


def test_the_report_names_the_versions_and_the_device() -> None:
    lines = doctor.build_report().lines
    assert f"   torch   {torch.__version__}" in lines
    assert ("   cuda    none" in lines) == (not torch.cuda.is_available())


def test_every_typical_call_is_served_and_the_report_says_by_whom() -> None:
    lines = doctor.build_report().lines
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.zeros(2, 8, 256, 64, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for name, made in doctor.TYPICAL_CALLS.items():
        assert f"   {name:<22} {foci.plan(q, q, q, **made(q)).chosen}" in lines


def test_refusals_come_with_their_reasons() -> None:
    q = torch.zeros(2, 8, 256, 64)
    plan = foci.plan(q, q, q, **doctor.TYPICAL_CALLS["additive score"](q))
    reason = plan.refusals["sdpa"][0]
    assert reason in " ".join(" ".join(doctor.build_report(TextPage(120)).lines).split())


def test_extras_are_those_of_the_package() -> None:
    found = doctor.optional_packages()
    assert set(found) == {"hf", "tasks", "view"}
    assert found["hf"] == ["safetensors", "transformers"]


def test_what_is_not_installed_comes_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "optional_packages", lambda: {"hf": ["torch", "no-such-package"], "view": ["no-such", "nor-this"]}
    )
    page = TextPage()
    doctor.write_extras(page)
    assert page.lines[1:] == [
        "extras, each optional",
        f"   hf      torch {torch.__version__}",
        "           pip install 'foci[hf]' adds no-such-package",
        "   view    pip install 'foci[view]' adds no-such, nor-this",
    ]


def test_the_report_fits_the_page() -> None:
    assert [line for line in doctor.build_report(TextPage(80)).lines if text_width(line) > 80] == []
