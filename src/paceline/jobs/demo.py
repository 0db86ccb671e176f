"""The demonstration: recipes under every strategy that a CPU has, on embedded data, and a report of what came of it."""

from __future__ import annotations

import sys

from rich.console import Console

from paceline.jobs.compare import Wish, compare_recipes

FOLDER = "runs/demo"
STRATEGIES = "single,ddp,lightning"
COMPARISONS = {
    "classification": (["classification"], {"epochs": "3"}),
    "generation": (["dcgan", "dual_gan"], {"epochs": "1"}),
}


def demo() -> int:
    """Compares strategies on a classifier, and two generative recipes with each other; ends with the reports' paths."""
    console = Console(highlight=False)
    code = 0
    for name, (recipes, settings) in COMPARISONS.items():
        console.rule(f"{' against '.join(recipes)}: {STRATEGIES} on the CPU")
        flags = {"preset": "quick", "accelerator": "cpu", "devices": "2", "out": f"{FOLDER}/{name}", **settings}
        flags["precision"] = "fp64"  # in which strategies that compute the same also end the same
        full = name == "classification"  # parity and ceilings are shown once, to keep this short
        wish = Wish(STRATEGIES, verify=full, ceilings=full, assignments=("evaluate_every=1 epochs",))
        code = compare_recipes(recipes, flags, wish) or code
        if code >= 128:  # the person asked to stop
            return code
    console.rule("reports")
    for name in COMPARISONS:
        print(f"{FOLDER}/{name}/report.html")
    return code


if __name__ == "__main__":
    sys.exit(demo())
