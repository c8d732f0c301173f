import json
import re

import pytest
import torch

from foci.models.pretrained import pretrained
from foci.tasks.rejection import REJECTION_FILE, Rejection
from foci.tasks.vision import Vision


def test_a_threshold_declines_the_share_of_known_inputs() -> None:
    torch.manual_seed(0)
    known, others = torch.randn(300, 8), torch.randn(300, 8) + 3.0
    rejection = Rejection.fit(known, others, hidden=4)
    for lost in (0.0, 0.01, 0.1):
        assert int(rejection.with_threshold(known, lost).declines(known).sum()) == round(300 * lost)
    assert float(rejection.with_threshold(known, 0.02).declines(torch.randn(300, 8) + 3.0).float().mean()) > 0.95


def test_it_is_stored_with_the_task() -> None:
    torch.manual_seed(0)
    features = torch.randn(50, 4)
    rejection = Rejection.fit(features, features + 2.0, hidden=3).with_threshold(features, 0.1)
    loaded = Rejection.from_files({REJECTION_FILE: rejection.to_json()})
    assert loaded is not None
    assert torch.allclose(loaded.scores(features), rejection.scores(features), atol=1e-3)
    assert loaded.threshold == rejection.threshold
    assert Rejection.from_files({}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": [1.0]}, "must have one output for each row and for the bias, got 1 and 1"),
        ({"hidden": [["a"]]}, "hidden must be a list of finite numbers"),
        ({"hidden": 3}, "must have one output for each row"),
        ({"threshold": None}, "threshold must be a list of finite numbers"),
        ({"more": 1}, "rejection.json must be an object with hidden, output, threshold"),
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, object], message: str) -> None:
    content = {"hidden": [[0.0, 1.0]], "output": [0.0, 1.0], "threshold": 0.0}
    with pytest.raises(ValueError, match=re.escape(message)):
        Rejection.from_files({REJECTION_FILE: json.dumps(content | change)})


def test_vision_declines_blank_images_and_noise() -> None:
    model = pretrained("vision")
    assert isinstance(model.task, Vision)
    torch.manual_seed(0)
    noise = torch.randn(4, 1, 28, 28)
    blank = torch.linspace(-0.8, 2.0, 4).view(4, 1, 1, 1).expand(4, 1, 28, 28)
    with torch.no_grad():
        assert bool(model.task.classify(model.model, torch.cat([noise, blank]))[1].all())
