"""`paceline new`: write a small working recipe or source to start from."""

from __future__ import annotations

import keyword
from pathlib import Path

from paceline.core.errors import UserError, unknown

_TEMPLATES = Path(__file__).parent / "templates"  # these modules are linted and type-checked like all other code


def new(kind: str, name: str, folder: Path) -> Path:
    """Write a small working recipe, GAN or source to `folder`/`name`.py and return its path."""
    kinds = [file.stem for file in _TEMPLATES.glob("*.py")]
    if kind not in kinds:
        raise unknown("kind of file", kind, kinds)
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UserError(f"new {kind} {name}: not a valid Python name; use letters, digits and _, for example my_{kind}")
    path = folder / f"{name}.py"
    text = (_TEMPLATES / f"{kind}.py").read_text(encoding="utf-8")
    text = text.replace(f"my_{kind}", name).replace(f"My{kind.capitalize()}", _class_name(kind, name))
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"new {kind} {name}: {path} exists; choose a different name or move the file") from None
    except OSError as error:
        raise UserError(f"new {kind} {name}: cannot write {path}: {error.strerror}") from None
    return path


def _class_name(kind: str, name: str) -> str:
    """Return a class name in CamelCase that ends in `kind`, so it cannot clash with other names in the template."""
    words = [word for word in name.split("_") if word]
    if len(words) < 2 or words[-1].lower() != kind:
        words.append(kind)
    return "".join(word[0].upper() + word[1:] for word in words)
