import pytest
import torch

import foci
from foci.cli import doctor
from foci.runtime.console import TextPage, text_width


def test_the_report_names_the_versions_and_the_device() -> None:
    lines = doctor.build_report().lines
    assert f"   torch   {torch.__version__}" in lines
    assert ("   cuda    none" in lines) == (not torch.cuda.is_available())


def test_the_report_names_the_backend_of_every_typical_call() -> None:
    lines = doctor.build_report().lines
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.zeros(2, 8, 256, 64, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for name, options in doctor.typical_calls(q).items():
        assert f"   {name:<22} {foci.plan(q, q, q, **options).chosen}" in lines


def test_refusals_are_listed_with_their_reasons() -> None:
    q = torch.zeros(2, 8, 256, 64)
    plan = foci.plan(q, q, q, **doctor.typical_calls(q)["additive score"])
    reason = plan.refusals["sdpa"][0]
    assert reason in " ".join(" ".join(doctor.build_report(TextPage(120)).lines).split())


def test_optional_packages_are_those_of_the_installed_package() -> None:
    found = doctor.optional_packages()
    assert set(found) == {"diffusion", "hf", "notebook", "tasks", "view"}
    assert found["hf"] == ["safetensors", "transformers"]


def test_missing_packages_are_listed_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "optional_packages", lambda: {"hf": ["torch", "no-such-package"], "view": ["no-such", "nor-this"]}
    )
    page = TextPage()
    doctor.write_extras(page)
    assert page.lines[1:] == [
        "optional packages",
        f"   hf      torch {torch.__version__}",
        "           pip install 'foci[hf]' adds no-such-package",
        "   view    pip install 'foci[view]' adds no-such, nor-this",
    ]


def test_the_report_fits_the_page() -> None:
    assert [line for line in doctor.build_report(TextPage(80)).lines if text_width(line) > 80] == []
