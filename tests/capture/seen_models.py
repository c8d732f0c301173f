"""Runs models of transformers, diffusers and timm under `foci.watch` and writes which are recorded, and why others not.

python -m tests.capture.seen_models                # docs/reference/seen_models.csv; the rows of missing libraries stay
python -m tests.capture.seen_models --count        # only the counts of each library, for the table of versions
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import foci

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "seen_models.csv"
COLUMNS = ["library", "model", "kind", "attention", "output", "reason"]

# The smallest model of each family of timm with attention. Sizes: those of the model itself.
TIMM = [
    "beit_base_patch16_224",
    "beit3_base_patch16_224",
    "cait_xxs24_224",
    "coat_lite_tiny",
    "coatnet_pico_rw_224",
    "convit_tiny",
    "crossvit_tiny_240",
    "davit_tiny",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "edgenext_xx_small",
    "efficientformer_l1",
    "efficientvit_b0",
    "efficientvit_m0",
    "eva02_tiny_patch14_224",
    "fastvit_sa12",
    "flexivit_small",
    "gcvit_xxtiny",
    "hiera_tiny_224",
    "levit_128s",
    "maxvit_pico_rw_256",
    "mobilevit_xxs",
    "mobilevitv2_050",
    "mvitv2_tiny",
    "naflexvit_base_patch16_gap",
    "nest_tiny",
    "nextvit_small",
    "pit_ti_224",
    "pvt_v2_b0",
    "samvit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "swinv2_cr_tiny_224",
    "tiny_vit_5m_224",
    "tnt_s_patch16_224",
    "twins_svt_small",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_small_patch16_dinov3",
    "vit_tiny_patch16_224",
    "vit_base_patch16_clip_224",
    "vit_base_patch16_siglip_224",
    "vitamin_small_224",
    "volo_d1_224",
    "xcit_nano_12_p16_224",
]


class Model(NamedTuple):
    """A model to run, made on request, and how it is called."""

    library: str
    name: str
    kind: str
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module], Any]


def transformers_models() -> Iterator[Model]:
    from tests.capture import architectures, vision_language

    texts = architectures.ARCHITECTURES | architectures.OWN_ATTENTION | architectures.PARTLY_OWN
    for name, text in texts.items():
        yield Model(
            "transformers",
            name,
            text.kind,
            lambda text=text: architectures.made(text),
            lambda model, text=text: model(**text.inputs()),
        )
    import transformers

    for name, case in vision_language.CASES.items():
        if name in texts:
            continue
        yield Model(
            "transformers",
            name,
            "vision-language",
            lambda case=case: case.build(transformers).eval(),
            lambda model, case=case: model(**case.inputs(case.draw())),
        )


def diffusers_models() -> Iterator[Model]:
    from tests.capture.diffusion_models import CASES
    from tests.capture.test_diffusion import make_inputs

    for name, case in CASES.items():
        yield Model(
            "diffusers",
            f"{name} ({type(case.model()).__name__})",
            "diffusion",
            case.model,
            lambda model, case=case: case.run(model, *make_inputs(case)),
        )


def timm_models() -> Iterator[Model]:
    import timm

    for name in TIMM:
        if name in timm.list_models():
            yield Model("timm", name, "vision", lambda name=name: timm.create_model(name).eval(), call_timm)


def call_timm(model: Any) -> Tensor:
    size = model.pretrained_cfg["input_size"]
    return model(torch.rand(1, *size, generator=torch.Generator().manual_seed(0)))


LIBRARIES = {"transformers": transformers_models, "diffusers": diffusers_models, "timm": timm_models}


def describe(model: Model) -> list[str]:
    """The row of a model: what was recorded, whether the output stayed the same, and the reason where one is needed."""
    row = [model.library, model.name, model.kind]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = model.make()
            plain = find_tensor(model.call(made))
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            # Without foci: the class, or one of the sizes of its config, is newer.
            return [*row, "not built", "", str(error).splitlines()[0]]
        try:
            with foci.watch(made) as seen:
                watched = find_tensor(model.call(made))
        except Exception as error:  # noqa: BLE001
            return [*row, "refused", "", str(error).splitlines()[0]]
    reasons = Counter(reason.partition(": ")[2] or reason for reason in map(str, seen.unseen))
    layers, unseen = len(seen.layers), len(seen.unseen)
    if not layers and not unseen:
        reasons["no module with attention was found: neither a call nor a name says so"] = 1
    recorded = f"{layers} of {layers + unseen}" if unseen else f"all {layers}"
    return [*row, recorded if layers else "none", compare(plain, watched), "; ".join(reasons)]


def find_tensor(out: Any) -> Tensor:
    """The first floating-point tensor of an output."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if hasattr(out, "values") else out
    return next(
        found for value in values if value is not None and (found := find_tensor(value)).dtype.is_floating_point
    )


def compare(plain: Tensor, watched: Tensor) -> str:
    if torch.equal(plain, watched):
        return "the same bits"
    return "within rounding" if torch.allclose(plain, watched, rtol=1e-3, atol=1e-4) else "DIFFERS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="print counts, write nothing")
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    options = parser.parse_args()
    found = [library for library in options.only if find_spec(library)]
    rows = []
    for library in found:
        for model in LIBRARIES[library]():
            rows.append(describe(model))
            print(*rows[-1], sep=" | ", flush=True)
    for library in found:
        results = Counter(row[3].partition(" ")[0] for row in rows if row[0] == library)
        print(library, __import__(library).__version__, dict(results))
    if options.count:
        return
    kept = [row for row in csv.reader(TABLE.open()) if row[0] not in {"library", *found}] if TABLE.exists() else []
    with TABLE.open("w", newline="") as file:
        ordered = sorted(kept + rows, key=lambda row: (list(LIBRARIES).index(row[0]), row[2], row[1].lower()))
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *ordered])


if __name__ == "__main__":
    main()
