"""Helpers for the tests in this folder: hosts as network namespaces, and wrappers for system commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def ask(*words: str) -> str:
    """Return the output of a command, or an empty string if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.stdout if done.returncode == 0 else ""


class Host:
    """A network namespace with its own address."""

    def __init__(self, name: str, address: str, interface: str) -> None:
        self.name, self.address, self.interface = name, address, interface

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the command prefix that runs a command on this host."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Take the host's network link down."""
        ip("-n", self.name, "link", "set", self.interface, "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)
