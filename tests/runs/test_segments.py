"""A run that resumes on different devices or another machine records its earlier parts as segments."""

from __future__ import annotations

from dataclasses import replace

from paceline.runs.record import Choices, Segment, changes, earlier_segments, segment_of

MACHINE = {"cpu": "a CPU", "cores": "8", "torch": "2.15"}
SETTINGS = {"strategy": "auto", "devices": 1, "gpus": "", "graph": "auto", "deterministic": False}


def segment(devices: int = 1, accelerator: str = "cpu", machine: dict[str, str] = MACHINE) -> Segment:
    choices = Choices("ddp" if devices > 1 else "single", devices, accelerator, "resident", workers=0)
    return segment_of(SETTINGS, choices, machine)


def resume(*starts: tuple[int, int]) -> list[tuple[int, int]]:
    """Resume a run at the given image counts and device counts; return its earlier segments."""
    earlier: tuple[Segment, ...] = ()
    last = segment(starts[0][1])
    for images, devices in starts[1:]:
        earlier, last = earlier_segments([*earlier, last], images, segment(devices)), segment(devices)
    return [(one.until_images, one.devices) for one in earlier]


def test_a_run_that_resumes_unchanged_has_no_earlier_segment() -> None:
    assert resume((0, 2), (100, 2), (200, 2)) == []


def test_every_earlier_segment_is_recorded_with_the_image_count_at_its_end() -> None:
    assert resume((0, 1), (100, 2), (200, 4), (300, 4)) == [(100, 1), (200, 2)]


def test_a_segment_that_ended_before_its_first_checkpoint_is_not_recorded() -> None:
    assert resume((0, 1), (0, 2)) == []
    assert resume((0, 1), (100, 2), (100, 4)) == [(100, 1)]
    assert resume((0, 1), (100, 2), (100, 1)) == []
    assert resume((0, 1), (100, 2), (200, 4), (200, 2), (300, 8)) == [(100, 1), (300, 2)]


def test_progress_lost_by_resuming_from_an_older_checkpoint_is_not_in_a_segment() -> None:
    assert resume((0, 1), (100, 2), (200, 4), (50, 4)) == [(50, 1)]
    assert resume((0, 1), (100, 2), (200, 4), (150, 8)) == [(100, 1), (150, 2)]


def test_another_machine_starts_a_new_segment() -> None:
    assert changes(segment(machine=MACHINE | {"cores": "4"}), segment()) == ["cores 4 → 8"]


def test_settings_that_apply_to_only_one_of_two_segments_are_not_compared() -> None:
    on_gpu = segment(accelerator="cuda", machine=MACHINE | {"gpus": "1 × a GPU"})
    assert changes(segment(), on_gpu) == ["accelerator cpu → cuda"]
    assert changes(on_gpu, replace(on_gpu, graph="off")) == ["graph auto → off"]


def test_a_segment_is_unchanged_after_conversion_to_toml_and_back() -> None:
    for one in (segment(2), replace(segment(accelerator="cuda"), until_images=100)):
        assert Segment.from_table(one.to_table()) == one
