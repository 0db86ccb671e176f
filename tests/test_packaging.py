"""Packaging: dependencies and extras are declared, the wheel is complete, and links in the README work."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
FOR_DEVELOPERS = {"dev", "docs"}
REPOSITORY = PROJECT["project"]["urls"]["Repository"]
DISTRIBUTIONS = {  # module → distribution, if the names differ
    "PIL": "pillow",
    "nvidia": "nvidia-dali-cuda130",
    "openslide": "openslide-python",
    "pynvml": "nvidia-ml-py",
    "torch_fidelity": "torch-fidelity",
    "yaml": "pyyaml",
}
NOT_DECLARED = {"triton", "_typeshed"}  # torch installs triton; only mypy needs _typeshed


def names(requirements: list[str]) -> set[str]:
    """Return the names of the required distributions, in lower case."""
    return {re.split(r"[^\w.-]", requirement)[0].lower() for requirement in requirements}


def imported() -> dict[str, str]:
    """Return every third-party module that Paceline imports, with one of the importing files."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            found |= {module.split(".")[0]: str(file.relative_to(ROOT)) for module in modules}
    return {name: file for name, file in found.items() if name != "paceline" and name not in sys.stdlib_module_names}


def test_every_imported_package_is_declared() -> None:
    declared = names(PROJECT["project"]["dependencies"])
    for extra in EXTRAS.keys() - FOR_DEVELOPERS:
        declared |= names(EXTRAS[extra])
    missing = {
        module: file
        for module, file in imported().items()
        if DISTRIBUTIONS.get(module, module).lower() not in declared | NOT_DECLARED
    }
    assert not missing and "torch" in imported()


def test_the_extra_all_includes_every_extra_for_users() -> None:
    (everything,) = EXTRAS["all"]
    assert everything == f"paceline[{','.join(sorted(EXTRAS.keys() - FOR_DEVELOPERS - {'all'}))}]"


def test_extras_mentioned_in_messages_exist() -> None:
    pattern = re.compile(
        r"""install_extra\(["'](\w+)["']\)|missing\(\w+, ["'](\w+)["']\)|\bextra = "(\w+)"|paceline\[(\w+)\]"""
    )
    files = [*PACKAGE.rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for file in files for found in pattern.findall(file.read_text(encoding="utf-8")) for name in found}
    named -= {""}
    assert len(named) > 5 and named <= EXTRAS.keys()


def test_every_file_in_the_package_is_in_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["paceline"]
    shipped = {file for pattern in patterns for file in PACKAGE.glob(pattern)}
    others = {file for file in PACKAGE.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert others and not others - shipped


def test_links_in_the_readme_work_outside_the_repository() -> None:
    """A package index such as PyPI shows the README without the repository's other files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.findall(r"\]\((?!https://)[^)]*\)", text), "a relative link"
    definition = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
    body, defined = definition.sub("", text), dict(definition.findall(text))
    raw = REPOSITORY.replace("https://github.com/", "https://raw.githubusercontent.com/")
    prefix = re.compile(rf"({REPOSITORY}/blob|{raw})/main/")
    files = {link: ROOT / prefix.sub("", link).partition("#")[0] for link in defined.values()}
    wrong = [link for link, file in files.items() if not prefix.match(link) or not file.is_file()]
    assert len(defined) > 20 and not wrong
    assert not [name for name in defined if f"[{name}]" not in body], "not used"
