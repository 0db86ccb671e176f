"""`paceline new` writes files that work unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from running import run_fork

from paceline.commands.new import new
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core import registry
from paceline.core.errors import UserError


def test_a_new_recipe_trains_on_a_new_source(tmp_path: Path) -> None:
    new("source", "shapes", tmp_path)
    new("recipe", "shape_reader", tmp_path)
    words = ("--data", "./shapes.py", "--set", "width=8", "--epochs", "2", "--accelerator", "cpu", "--out", "run")
    trained = run_fork(tmp_path, "train", "./shape_reader.py", *words)
    assert trained.wait() == 0, trained.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["test/top1"] > 70, "one of two classes: chance is 50%"
    assert "class ShapeReaderRecipe(Recipe)" in (tmp_path / "shape_reader.py").read_text()


@pytest.mark.parametrize(("height", "width"), [(8, 8), (32, 32), (33, 47), (1, 1)])
def test_a_new_recipe_accepts_any_image_size_and_is_reproducible_on_a_gpu(
    tmp_path: Path, height: int, width: int
) -> None:
    recipe_class = registry.load_class("recipe", str(new("recipe", "mine", tmp_path)), Recipe)
    recipe = recipe_class(
        recipe_class.Settings(width=2), DataSpec(channels=3, height=height, width=width, num_classes=5)
    )
    batch = {"image": torch.zeros(2, 3, height, width), "label": torch.tensor([0, 4])}
    loss = sum(recipe("classifier", batch).terms.values())
    assert isinstance(loss, torch.Tensor)
    nodes, names = [loss.grad_fn], set()
    while nodes:
        if node := nodes.pop():
            names.add(node.name())
            nodes += [before for before, _ in node.next_functions]
    # The backward passes of pooling and upsampling layers are nondeterministic on a GPU:
    # https://pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html
    assert "ConvolutionBackward0" in names and not [name for name in names if "Pool" in name or "Upsample" in name]


def test_a_new_recipe_reports_which_data_it_needs(tmp_path: Path) -> None:
    recipe_class = registry.load_class("recipe", str(new("recipe", "unlabelled", tmp_path)), Recipe)
    with pytest.raises(UserError, match="--data"):
        recipe_class(recipe_class.Settings(), DataSpec(channels=1, height=8, width=8))


def test_a_new_gan_can_be_trained_evaluated_and_sampled(tmp_path: Path) -> None:
    new("gan", "drawer", tmp_path)
    short = ("--preset", "quick", "--images", "256", "--set", "width=8", "--set", "size=8", "--out", "run")
    trained = run_fork(tmp_path, "train", "./drawer.py", *short)
    assert trained.wait() == 0, trained.stderr
    assert "best: train/FID[pixels-8x8]" in trained.stdout
    sampled = run_fork(tmp_path, "sample", "run", "--trust", "--out", "drawn.png")
    assert sampled.wait() == 0, sampled.stderr
    assert (tmp_path / "drawn.png").is_file()


def test_the_guide_shows_the_file_that_paceline_new_gan_writes(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "networks.md").read_text()
    section = guide.partition("## Several networks")[2].partition("\n## ")[0]
    shown = [line for line in section.partition("```python\n")[2].partition("```")[0].splitlines() if line]
    assert len(shown) >= 10
    assert not set(shown) - set(new("gan", "my_gan", tmp_path).read_text().splitlines())


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        *(("recipe", name, "not a valid Python name") for name in ("my-recipe", "class", "2x", "", "../x", "a.py")),
        ("recipes", "x", "did you mean 'recipe'"),
        ("recipe", "mine", r"mine\.py exists; choose a different name"),
    ],
)
def test_a_wrong_kind_or_name_is_rejected(tmp_path: Path, kind: str, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text("my work")
    with pytest.raises(UserError, match=message):
        new(kind, name, tmp_path)
    with pytest.raises(UserError, match="nowhere"):
        new("recipe", "x", tmp_path / "nowhere")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("mine.py", "my work")]
