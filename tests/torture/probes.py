"""Run a function in a forked process with time and memory limits (a probe), and return the outcome."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running import Running, start_function_in_ranks

LIMIT_SECONDS = 60
LIMIT_BYTES = 2 * 2**30  # in addition to the memory that the process has already mapped
USER_CODES = (0, 1, 2)  # success, success with skipped files, user error


@dataclass(frozen=True)
class Ended:
    """The exit code and output of a probe (a process with time and memory limits)."""

    code: int
    text: str  # stdout and stderr
    errors: str  # stderr

    @property
    def fault(self) -> str:
        """A description of what went wrong, or an empty string."""
        if self.code == -signal.SIGALRM:
            return f"was still running after {LIMIT_SECONDS} s"
        if self.code < 0:
            return f"was killed by signal {-self.code}"
        if "Traceback (most recent call last)" in self.text:
            return f"printed a traceback: {self.text.strip().splitlines()[-1]}"
        if self.code not in USER_CODES:
            return f"ended with exit code {self.code}"
        if self.code == 2 and len(self.errors.strip().splitlines()) != 1:
            return f"printed {len(self.errors.splitlines())} lines: {self.errors!r}"
        return ""


def start_probe(folder: Path, function: Callable[..., int | None], *values: Any) -> Running:
    """Start an importable function in `folder`, in a process with time and memory limits."""
    (running,) = start_function_in_ranks(folder, 1, _limited, function, values)
    return running


def end_probe(running: Running) -> Ended:
    """Wait until a probe has ended, and return its exit code and output."""
    code = running.wait(LIMIT_SECONDS + 30)
    return Ended(code, running.stdout + running.stderr, running.stderr)


def run_probe(folder: Path, function: Callable[..., int | None], *values: Any) -> Ended:
    """Run a function as a probe, and return its exit code and output."""
    return end_probe(start_probe(folder, function, *values))


def run_command(arguments: list[str]) -> int:
    """Run `paceline ARGUMENTS` in this process."""
    from paceline.cli.app import run

    return run(arguments)


def _limited(function: Callable[..., int | None], values: tuple[Any, ...]) -> int | None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_SECONDS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    warnings.filterwarnings("ignore", module="torch.cuda")  # the memory limit keeps CUDA from starting
    resource.setrlimit(resource.RLIMIT_AS, (mapped + LIMIT_BYTES, mapped + LIMIT_BYTES))
    return function(*values)


def fingerprint(paths: Iterable[Path]) -> dict[str, str]:
    """Return the checksum or type of every file in the given folders."""
    found: dict[str, str] = {}
    for path in paths:
        for file in [path, *(sorted(path.rglob("*")) if path.is_dir() and not path.is_symlink() else ())]:
            if file.is_symlink():
                found[str(file)] = f"link to {os.readlink(file)}"
            elif file.is_file():
                found[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
            else:
                found[str(file)] = "folder" if file.is_dir() else "other" if file.exists() else "missing"
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> str:
    """Describe which files differ; return an empty string if none do."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return f"changed {', '.join(sorted(names)[:5])}" if names else ""
