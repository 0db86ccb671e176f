"""Every recipe is listed wherever the documentation lists recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.registry import names

ROOT = Path(__file__).parents[2]
TABLES = {  # the first cell of a table's header, or the start of a list
    "README.md": "- The recipes are",
    "docs/index.md": "| recipe | model |",
    "docs/guide/data.md": "| recipe | channel counts other than 1 and 3 |",
    "mkdocs.yml": "- recipes/classification.md",
}


@pytest.mark.parametrize("file", TABLES)
def test_a_table_of_recipes_is_complete(file: str) -> None:
    text = (ROOT / file).read_text()
    assert TABLES[file] in text
    paragraph = text[text.index(TABLES[file]) :].split("\n\n")[0]
    missing = [name for name in names("recipe") if name not in paragraph]
    assert not missing, f"{file}: {missing}"


def test_every_recipe_has_a_page() -> None:
    assert sorted(names("recipe")) == sorted(page.stem for page in (ROOT / "docs" / "recipes").glob("*.md"))
