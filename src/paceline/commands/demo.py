"""The demo: two comparisons on a CPU with bundled data. Each runs as an ordinary `paceline` command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence

from paceline.core.terminal import open_screen
from paceline.core.watch import die_with_parent
from paceline.launch.child import path_flags

COMPARISONS = {  # arguments of each command, by output folder
    # In float64, equivalent strategies produce equal weights. In float32, rounding makes the weights differ. Two
    # processes are faster with the large batch. With the small batch, communication takes more time than they save.
    "runs/demo/strategies": "compare classification --preset quick --epochs 3 --strategies single,ddp --devices 2 "
    "--batch-size 32,128 --scale-lr linear --accelerator cpu --precision fp64 --set log_every='4 steps'",
    # Small networks, small batches and a high learning rate: digits appear within 2.5 epochs, which take a few seconds.
    "runs/demo/generators": "compare dcgan,dual_gan --preset quick --epochs 2.5 --strategies single --seeds 0,1 "
    "--jobs 2 --accelerator cpu --batch-size 8 --lr 1e-3 --set ngf=12 --set ndf=8 --set ema_half_life='300 images' "
    "--set evaluate_every='1.25 epochs' --set sample_every='1 epochs'",
}


def demo() -> int:
    """Compare strategies for a classifier, then two generative recipes; print the paths to the reports."""
    screen = open_screen()
    codes = []
    for words in commands():
        screen.rule()
        print(f"paceline {shlex.join(words)}", flush=True)
        codes.append(_run(words))
        if codes[-1] >= 128:  # the user asked to stop
            return codes[-1]
    screen.rule("reports")
    for folder in COMPARISONS:
        print(f"{folder}/report.html")
    return max(codes)


def commands() -> list[list[str]]:
    """Return the arguments of each `paceline` command in the demo."""
    return [[*shlex.split(words), "--out", folder] for folder, words in COMPARISONS.items()]


def _run(words: Sequence[str]) -> int:
    child = subprocess.Popen([sys.executable, *path_flags(), "-m", "paceline", *words], preexec_fn=die_with_parent)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # Ctrl-C also reaches the child process, which then shuts down cleanly
            continue


if __name__ == "__main__":
    sys.exit(demo())
