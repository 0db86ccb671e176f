"""A trace is split into sections, phases, kernels, gaps and communication."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.training.trace import intersect, merge, read_trace, subtract


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
