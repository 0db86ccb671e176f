"""How a run went before it went on in another way, as its record keeps it."""

from __future__ import annotations

from typing import Any

from paceline.runs.segments import EARLIER, UNTIL, changes, earlier_ways, strategy_of, way_of

MACHINE = {"cpu": "a CPU", "cores": "8", "torch": "2.15", "accelerator": "cpu", "loader": "resident"}


def settings(devices: int = 1, strategy: str = "auto") -> dict[str, Any]:
    return {"strategy": strategy, "devices": devices, "accelerator": "auto", "gpus": "", "loader": "auto"}


def go_on(*starts: tuple[int, int]) -> list[tuple[int, str]]:
    """What a run keeps that was started from so many images on so many devices, time after time."""
    kept: dict[str, Any] = settings(starts[0][1])
    made_with: dict[str, Any] = dict(MACHINE)
    for images, devices in starts[1:]:
        now = settings(devices)
        made_with = MACHINE | {EARLIER: earlier_ways(kept, made_with, images, way_of(now, MACHINE))}
        kept = now
    return [(way[UNTIL], way["devices"]) for way in made_with.get(EARLIER, [])]


def test_a_run_that_goes_on_as_before_has_no_earlier_way() -> None:
    assert go_on((0, 2), (100, 2), (200, 2)) == []


def test_every_way_is_kept_with_where_it_ended() -> None:
    assert go_on((0, 1), (100, 2), (200, 4), (300, 4)) == [(100, "1"), (200, "2")]


def test_a_way_that_was_stopped_before_its_first_checkpoint_leaves_nothing() -> None:
    assert go_on((0, 1), (0, 2)) == []
    assert go_on((0, 1), (100, 2), (100, 4)) == [(100, "1")]
    assert go_on((0, 1), (100, 2), (100, 1)) == []
    assert go_on((0, 1), (100, 2), (200, 4), (200, 2), (300, 8)) == [(100, "1"), (300, "2")]


def test_what_a_run_has_lost_is_no_part_of_its_ways() -> None:
    assert go_on((0, 1), (100, 2), (200, 4), (50, 4)) == [(50, "1")]
    assert go_on((0, 1), (100, 2), (200, 4), (150, 8)) == [(100, "1"), (150, "2")]


def test_another_machine_is_another_way_and_what_an_old_record_does_not_tell_is_not() -> None:
    now = way_of(settings(), MACHINE)
    assert changes(way_of(settings(), MACHINE | {"cores": "4"}), now) == ["cores 4 → 8"]
    assert changes(way_of(settings(), {}), now) == []


def test_dp_on_a_cpu_is_single_and_auto_is_what_it_means() -> None:
    assert strategy_of(settings(2, "dp"), "cpu") == ("single", 1)
    assert strategy_of(settings(2, "dp"), "cuda") == ("dp", 2)
    assert [strategy_of(settings(n), "cpu") for n in (1, 2)] == [("single", 1), ("ddp", 2)]
