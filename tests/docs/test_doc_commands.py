"""Every documented command runs with small settings, unless a comment above its block explains why it is not run."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import ROOT, Block, Command, blocks, commands
from running import start_function_in_ranks, start_ranks

TINY = str(ROOT / "tests" / "tiny.py")  # a recipe whose steps take a millisecond

# Patterns and replacements that make documented commands run faster, applied in order.
# Commands that become identical run only once.
SMALLER: tuple[tuple[str, str], ...] = (
    (r"^paceline verify .*$", f"paceline verify {TINY} --strategies single,ddp --devices 1 --steps 1"),
    (r"^paceline compare (?!runs/).*$", f"paceline compare {TINY} --strategies single --images 16 --no-verify"),
    (r"file:///tmp/", "file://PLACE/"),
    (r" --epochs 14\b", " --images 48"),  # more images than the run was trained on, so that it resumes
    (r" --(epochs|batch-size|crop) \S+", ""),
    (r"^(paceline train (super_resolution|esrgan|restoration) --preset quick)", r"\1 --data-root docs/examples/photos"),
    (r" --devices 2 (.*) --out runs/ranks", r" --strategy ddp --devices 2 \1 --out runs/ddp"),  # the default strategy
    (r"^(paceline train classification)", r"\1 --batch-size 16 --set width=8"),
    (r"^(paceline train (dcgan|dual_gan))", r"\1 --batch-size 16 --set ngf=2 --set ndf=2 --set nz=4"),
    (r"^(paceline train r3gan)", r"\1 --batch-size 8 --images 16 --set width=8 --set num_blocks=1 --set size=16"),
    (r"^(paceline train super_resolution)", r"\1 --images 4 --batch-size 2 --crop 16 --set num_blocks=1 --set width=2"),
    (r"^(paceline train esrgan.*) --images \d+", r"\1"),
    (r"^(paceline train esrgan)", r"\1 --images 4 --batch-size 2 --crop 16 --set width=2 --set growth=2"),
    (r"^(paceline train restoration)", r"\1 --images 4 --batch-size 2 --crop 16 --set depth=1 --set width=2"),
    (r"^(paceline train translation)", r"\1 --images 2 --batch-size 2 --set ngf=2 --set ndf=2"),
    (r"^(paceline train (?!.*--images)(?!.*--help).*)$", r"\1 --images 32"),
)
SMALLER_PYTHON = ((r"epochs=\d", "images=32, width=8, batch_size=16"),)
# Pages whose runs are used by other pages come first.
FIRST = ("README.md", "docs/index.md", "docs/tour.md", "docs/guide/train.md", "docs/recipes/", "docs/guide/")
# Pages whose runs no other page uses; test_doc_names checks their commands in every run of the tests.
SLOW = ("r3gan", "esrgan", "dual_gan", "translation")


def order(page: str) -> tuple[int, str]:
    return next((number for number, start in enumerate(FIRST) if page.startswith(start)), len(FIRST)), page


def runnable_commands() -> dict[str, list[Command]]:
    """Return the commands that are run, in order, keyed by page."""
    found: dict[str, list[Command]] = {}
    for command in sorted(commands(), key=lambda one: order(one.page)):
        if not command.reason:
            found.setdefault(command.page, []).append(command)
    return found


def python_blocks() -> list[Block]:
    """Return the Python examples that use runs. Examples that define classes are covered by other tests."""
    return [block for block in blocks() if block.language == "python" and any("runs/" in line for line in block.lines)]


class Place:
    """A folder in which the documented commands run in order, each only once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: dict[str, tuple[int, str]] = {}  # exit code and output of each command

    def run(self, command: Command) -> tuple[int, str]:
        text = smaller(command.text).replace("PLACE", str(self.folder))
        if text not in self.ended:
            words = shlex.split(text)
            if words[0] == "paceline":
                # Ranks start faster without a launcher, which other tests cover.
                several = words[1] == "train" and "--devices" in words
                num_ranks = int(words[words.index("--devices") + 1]) if several else 1
                ranks = start_ranks(self.folder, num_ranks, *words[1:])
                codes = [rank.wait() for rank in ranks]
                self.ended[text] = max(codes, key=abs), ranks[0].stdout + "".join(rank.stderr for rank in ranks)
            else:
                done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True)
                self.ended[text] = done.returncode, done.stdout + done.stderr
        return self.ended[text]

    def run_before(self, page: str) -> None:
        """Run the commands on all pages that come before a page."""
        for earlier, found in runnable_commands().items():
            if order(earlier) < order(page) and Path(earlier).stem not in SLOW:
                for command in found:
                    self.run(command)


def smaller(text: str) -> str:
    for pattern, replacement in SMALLER:
        text = re.sub(pattern, replacement, text)
    return text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("documented")
    (folder / "docs").symlink_to(ROOT / "docs")
    for block in blocks():  # save the examples that start with a file name
        named = re.fullmatch(r"# (\w+\.py)", block.lines[0]) if block.language == "python" else None
        if named:
            (folder / named[1]).write_text("\n".join(block.lines))
    yield Place(folder)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if Path(page).stem in SLOW else ()) for page in runnable_commands()],
)
def test_the_commands_on_a_page_run(place: Place, page: str) -> None:
    place.run_before(page)
    for command in runnable_commands()[page]:
        code, output = place.run(command)
        assert code == 0, f"{command}\nran as: {smaller(command.text)}\n{output}"


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: f"{block.page}:{block.line}")
def test_a_python_example_runs(place: Place, block: Block) -> None:
    place.run_before("~")
    code = "\n".join(block.lines)
    for pattern, replacement in SMALLER_PYTHON:
        code = re.sub(pattern, replacement, code)
    running = start_function_in_ranks(place.folder, 1, execute, code)[0]
    assert running.wait() == 0, f"{block.page}:{block.line}\n{running.stdout}{running.stderr}"


def execute(code: str) -> None:
    exec(code, {"__name__": "documented_example"})


def test_reasons_for_not_running_a_block_name_existing_tests() -> None:
    named = {path for command in commands() for path in re.findall(r"tests/[\w/.]+", command.reason)}
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_documented_commands_run_only_known_programs() -> None:
    """Blocks that run programs other than `paceline` and `ls` need a comment with the reason."""
    unknown = [command for command in commands() if not command.reason and command.words[0] not in ("paceline", "ls")]
    assert not unknown, "\n".join(map(str, unknown))
