"""The way in which a run goes: on which devices, by which strategy, fed by what. A resumed run may go on in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EARLIER = "earlier"  # in made_with: the ways in which a run went before, each with the images where it ended
UNTIL = "until_images"
HARDWARE = ("cpu", "cores", "gpus", "torch")  # and torch: what else than its settings makes a run's speed
DP_NEEDS_GPUS = "DataParallel needs GPUs; on a CPU it is the same as single"
Way = dict[str, str]


def accelerator_of(settings: Mapping[str, Any], made_with: Mapping[str, Any]) -> str:
    """Where a run computed; of one that does not tell, what "auto" is sure to have meant on its machine."""
    asked = str(settings.get("accelerator", "auto"))
    if asked == "auto":
        return str(made_with.get("accelerator") or ("cuda" if {"gpus", "cuda"} <= made_with.keys() else "cpu"))
    return asked


def strategy_of(settings: Mapping[str, Any], accelerator: str) -> tuple[str, int]:
    """The strategy that settings came to, and its devices."""
    strategy, devices = str(settings.get("strategy", "auto")), int(settings.get("devices", 1))
    if strategy == "dp" and accelerator == "cpu":
        return "single", 1
    return ("ddp" if devices > 1 else "single") if strategy == "auto" else strategy, devices


def way_of(settings: Mapping[str, Any], made_with: Mapping[str, Any]) -> Way:
    """How a run goes, by names that a person knows; what it does not tell is left out."""
    accelerator = accelerator_of(settings, made_with)
    strategy, devices = strategy_of(settings, accelerator)
    way: dict[str, Any] = {"strategy": strategy, "devices": devices, "accelerator": accelerator}
    way |= {"gpu_ids": settings.get("gpus"), "loader": made_with.get("loader")}
    if way["loader"] == "workers":
        way["workers"] = settings.get("workers")
    if accelerator == "cuda":
        way |= {name: settings.get(name) for name in ("graph", "deterministic")}
    way |= {name: made_with.get(name) for name in HARDWARE}
    return {name: str(value) for name, value in way.items() if value is not None}


def earlier_ways(kept: Mapping[str, Any], made_with: Mapping[str, Any], images: int, now: Way) -> list[dict[str, Any]]:
    """The ways before this one, of a run that goes on from so many images, in which it went for a while.

    `kept` are its settings as they are in its folder, and `made_with` what is kept beside them.
    """
    gone = [*ways_before(made_with), {UNTIL: images, **way_of(kept, made_with)}]
    found: list[dict[str, Any]] = []
    for one in gone:
        until = min(one[UNTIL], images)
        if until <= (found[-1][UNTIL] if found else 0):
            continue  # it was stopped before its first checkpoint
        if found and not changes(found[-1], one):
            found.pop()
        found.append({**one, UNTIL: until})
    return found[:-1] if found and not changes(found[-1], now) else found


def ways_before(made_with: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those that are kept with a run, in their order."""
    kept = made_with.get(EARLIER)
    ways = [one for one in kept if isinstance(one, dict)] if isinstance(kept, list) else []
    return [one for one in ways if type(one.get(UNTIL)) is int]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What is otherwise in another way, as `name was → is`, of what both tell."""
    names = [name for name in before if name in after and name != UNTIL]
    return [f"{name} {before[name]} → {after[name]}" for name in names if before[name] != after[name]]
