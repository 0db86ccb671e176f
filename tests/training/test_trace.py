"""A trace is split into sections, phases, kernels, gaps and communication, and the remedies follow from the shares."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.training.profiler import Situation, remedies, waits_by_rank
from paceline.training.trace import Collective, TraceTimes, intersect, merge, read_trace, subtract

ON_GPU = Situation("bf16", True, True, True, False, 0, False, False)


def event(kind: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": end - start, "tid": 1, **more}


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"paceline/{name}", start, end)


def launched(name: str, at: float, start: float, end: float, number: int) -> list[dict[str, Any]]:
    """Return a launch on the host and the kernel on the GPU."""
    arguments = {"args": {"correlation": number}}
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, at + 1, **arguments),
        event("kernel", name, start, end, **arguments),
    ]


def gpu_trace() -> dict[str, Any]:
    """A step of 100 µs after 20 µs of waiting for data; the GPU works from 30 to 60 and from 70 to 120."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name"},
            span("section/data", 0, 20),
            span("section/step", 20, 100),
            span("phase/generator/forward", 20, 40),
            span("phase/generator/backward", 40, 70),
            *launched("gemm", 25, 30, 60, 1),
            *launched("vectorized_elementwise_kernel", 45, 70, 90, 2),
            *launched("ncclDevKernel_AllReduce", 60, 85, 110, 3),
            *launched("Memcpy HtoD", 90, 110, 120, 4),
        ]
    }


def test_kernels_in_a_gpu_trace_belong_to_the_phase_that_launched_them() -> None:
    times = read_trace(gpu_trace())
    assert times.on_gpu and times.total == pytest.approx(120e-6)
    assert times.phases == pytest.approx({"generator: forward": 30e-6, "generator: backward": 45e-6})
    assert times.kernels["gemm"] == (pytest.approx(30e-6), 1)


def test_gaps_exclude_the_time_in_which_the_gpu_waits_for_data() -> None:
    assert read_trace(gpu_trace()).gaps == pytest.approx(20e-6)  # from 20 to 30 and from 60 to 70


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    times = read_trace(gpu_trace())
    assert times.communication == pytest.approx(25e-6)
    assert times.exposed_communication == pytest.approx(10e-6)  # from 90 to 100, the end of the step


def test_a_cpu_trace_subtracts_called_operators_and_finds_the_wait_for_gloo() -> None:
    trace = {
        "traceEvents": [
            span("section/step", 0, 100),
            event("cpu_op", "aten::conv2d", 10, 50),
            event("cpu_op", "aten::mkldnn_convolution", 20, 45),
            event("cpu_op", "_Exchange", 50, 90),  # a function that waits for a collective
            event("user_annotation", "gloo:all_reduce", 40, 80, tid=2),
        ]
    }
    times = read_trace(trace)
    assert times.kernels == {
        "aten::conv2d": (pytest.approx(15e-6), 1),
        "aten::mkldnn_convolution": (pytest.approx(25e-6), 1),
    }
    assert times.communication == pytest.approx(40e-6) and times.exposed_communication == pytest.approx(30e-6)
    assert times.gaps == pytest.approx(30e-6)


def test_unions_differences_and_intersections_of_ranges_are_correct() -> None:
    assert merge([(3, 4), (0, 2), (1, 3)]) == [(0, 4)]
    assert subtract([(0, 10)], [(2, 3), (5, 20)]) == [(0, 2), (3, 5)]
    assert intersect([(0, 4), (6, 8)], [(3, 7)]) == [(3, 4), (6, 7)]


def times_with(**changes: Any) -> TraceTimes:
    values: dict[str, Any] = {"on_gpu": True, "total": 1.0, "sections": {}, "phases": {}, "kernels": {"gemm": (0.9, 9)}}
    values |= {"communication": 0.0, "exposed_communication": 0.0, "gaps": 0.0, "updates": 0.0}
    values |= {"gaps_outside_updates": changes.get("gaps", 0.0), "num_collectives": 0, "collectives": ()}
    return TraceTimes(**{**values, **changes})


def test_waiting_for_data_is_the_first_remedy_if_it_takes_most_of_the_time() -> None:
    situation = Situation("bf16", True, True, True, True, 2, False, False)
    found = remedies(times_with(sections={"data": 0.6}, gaps=0.1), situation, {}, {})
    assert "--workers (now 2)" in found[0].action and found[0].gain == pytest.approx(0.6)
    assert found == tuple(sorted(found, key=lambda one: -one.gain))


def test_remedies_that_are_already_in_use_are_not_suggested() -> None:
    busy = {"vectorized_elementwise_kernel": (0.4, 10), "gemm": (0.5, 10)}
    plain = Situation("fp32", False, False, True, False, 0, False, False)
    suggested = [one.action for one in remedies(times_with(kernels=busy, gaps=0.1), plain, {}, {})]
    assert any("--compile on" in one for one in suggested) and any("--precision bf16" in one for one in suggested)
    assert any("--graph" in one for one in suggested)
    assert remedies(times_with(kernels=busy), ON_GPU, {}, {}) == ()


def test_at_most_five_remedies_are_suggested_and_none_below_one_percent() -> None:
    plain = Situation("fp32", False, False, True, True, 2, False, True)
    times = times_with(sections={"data": 0.2}, gaps=0.2, exposed_communication=0.2, kernels={"elementwise": (0.5, 1)})
    found = remedies(times, plain, {"evaluate": 0.3, "sample": 0.1, "save": 0.005}, {})
    assert len(found) == 5 and all(one.gain >= 0.01 for one in found)
    assert not any("save_every" in one.action for one in found)


def cpu_trace(backward: float) -> dict[str, Any]:
    """Two steps of 100 µs that end together on all ranks; `backward` is when a rank reaches its collective."""
    return {
        "traceEvents": [
            one
            for at in (0, 200)
            for one in (
                span("section/step", at, at + 100),
                event("cpu_op", "aten::conv2d", at, at + 10),
                event("user_annotation", "gloo:all_reduce", at + backward, at + 80, tid=2),
                span("phase/net/update", at + 80, at + 100),
                event("cpu_op", "aten::add_", at + 90, at + 95),
            )
        ]
    }


def test_each_collective_lists_its_time_and_the_part_that_delays_the_step() -> None:
    both = {"traceEvents": [*cpu_trace(30)["traceEvents"], event("user_annotation", "gloo:all_gather", 60, 90, tid=3)]}
    times = read_trace(both)
    assert [one.name for one in times.collectives] == ["gloo:all_reduce", "gloo:all_gather", "gloo:all_reduce"]
    assert [one.seconds for one in times.collectives] == pytest.approx([50e-6, 30e-6, 50e-6])
    assert [one.exposed for one in times.collectives] == pytest.approx([50e-6, 10e-6, 50e-6])  # each moment once


def test_waiting_for_a_slower_rank_is_separated_from_communication() -> None:
    fast, slow = read_trace(cpu_trace(20)), read_trace(cpu_trace(75))
    assert waits_by_rank(fast, [slow.collectives]) == {1: pytest.approx(110e-6)}
    assert waits_by_rank(slow, [fast.collectives, fast.collectives]) == {0: pytest.approx(110e-6)}
    assert waits_by_rank(fast, [slow.collectives[:1]]) == {1: pytest.approx(110e-6)}  # extrapolated from one step
    assert waits_by_rank(fast, [fast.collectives]) == {}


def test_collectives_that_start_in_another_order_are_compared_by_name() -> None:
    first, second = Collective("a", 3.0, 3.0), Collective("b", 5.0, 5.0)
    own = times_with(collectives=(first, second), num_collectives=2)
    assert waits_by_rank(own, [[second, first]]) == {}


def test_the_remedy_for_waiting_is_to_find_out_why_one_rank_is_slower() -> None:
    several = Situation("fp32", False, True, True, False, 0, False, True)
    times = times_with(on_gpu=False, gaps=0.04)
    found = remedies(times, several, {}, {1: 0.4, 0: 0.01})
    assert "rank 1 is slower" in found[0].action and found[0].gain == pytest.approx(0.4)
    assert found[0].reason == "waiting for rank 1 40.0%" and len(found) == 2
    assert not any("is slower" in one.action for one in remedies(times, several, {}, {0: 0.2, 1: 0.2}))  # only noise
    slow_first = remedies(times_with(on_gpu=False, gaps=0.5), several, {}, {0: 0.5})
    assert [one.reason for one in slow_first] == ["other ranks waiting for rank 0 50.0%"]


def test_gaps_inside_the_optimizer_are_counted_once() -> None:
    times = read_trace(cpu_trace(20))
    assert times.gaps == pytest.approx(50e-6) and times.gaps_outside_updates == pytest.approx(20e-6)
    assert times.updates == pytest.approx(40e-6)
    (batch,) = remedies(times, Situation("fp32", False, True, True, False, 0, True, True), {}, {})
    assert "a batch twice as large" in batch.action
    assert batch.gain == pytest.approx((20 + 40 + 120) / 300 / 2)


def test_a_batch_twice_as_large_saves_at_most_half_of_the_time() -> None:
    times = times_with(gaps=0.7, exposed_communication=0.4, updates=0.3)
    (batch,) = (one for one in remedies(times, ON_GPU, {}, {}) if "batch twice" in one.action)
    assert batch.gain == 0.5
