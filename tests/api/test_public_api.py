"""The public API: what `paceline` exports, how fast it imports, and that its functions return typed results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import paceline


def test_importing_the_package_imports_no_torch() -> None:
    code = "import paceline, sys; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_only_the_public_names_are_visible_and_each_can_be_imported() -> None:
    assert dir(paceline) == sorted(paceline.__all__)
    assert all(getattr(paceline, name) is not None for name in paceline.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        paceline.trian  # noqa: B018


@pytest.mark.parametrize("name", paceline.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    assert (getattr(paceline, name).__doc__ or "").strip()


def test_a_recipe_and_a_source_written_with_public_names_alone_train_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stripes.py").write_text(
        "import numpy as np\n"
        "from paceline import ArraySource, DataSpec\n\n\n"
        "class Stripes(ArraySource):\n"
        "    def __init__(self, split, settings):\n"
        "        labels = np.arange(64) % 2\n"
        "        images = np.zeros((64, 8, 8, 1), np.uint8)\n"
        "        images[labels == 0, ::2] = 255\n"
        "        images[labels == 1, :, ::2] = 255\n"
        "        super().__init__({'image': images, 'label': labels}, DataSpec(1, 8, 8, num_classes=2))\n"
    )
    result = paceline.train(
        "classification", data="./stripes.py", width=4, images=256, batch_size="16", accelerator="cpu", out="run"
    )
    assert isinstance(result, paceline.TrainResult) and result.exit_code == 0 and result.images == 256
    assert result.metrics["test/top1"] == 100.0
    model = paceline.load(result.folder, device="cpu")
    assert isinstance(model, paceline.Model)
    image = np.zeros((1, 1, 8, 8), np.uint8)
    image[:, :, ::2] = 255
    assert model.predict(image).argmax(dim=1).tolist() == [0]


def test_verify_returns_a_difference_for_every_network_and_strategy() -> None:
    found = paceline.verify("classification", ("single", "ddp"), steps=2, accelerator="cpu", width=2)
    assert {one.strategy for one in found} == {"ddp"} and {one.kind for one in found} == {"gradients", "weights"}
    assert all(one.is_equal for one in found)


def test_a_user_error_raises_the_error_that_the_command_prints() -> None:
    with pytest.raises(paceline.UserError, match="unknown recipe 'clasification'; did you mean 'classification'"):
        paceline.train("clasification")
