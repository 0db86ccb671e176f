"""CUDA graphs of a function: when it is captured. Results of real captures are tested on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_captures import replace_captures

from paceline.contracts.recipe import Batch
from paceline.parallel import graphed_function
from paceline.parallel.graphed_function import EAGER_CALLS, MOST_GRAPHS, GraphedFunction

CPU = torch.device("cpu")


class Recorded:
    """Stands in for a captured graph: computes the results of the capture once, and returns the inputs' sum."""

    def __init__(self, function: Callable[[list[Batch]], Batch], batches: list[Batch], pool: object) -> None:
        self.results = function([{name: tensor.clone() for name, tensor in batch.items()} for batch in batches])

    def replay(self, batches: list[Batch]) -> Batch:
        return {"replayed": batches[0]["image"].sum()}


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    replace_captures(monkeypatch, Recorded)
    yield monkeypatch


def double(inputs: Batch) -> Batch:
    return {"image": inputs["image"] * 2}


def batch(rows: int) -> Batch:
    return {"image": torch.ones(rows, 4)}


@pytest.mark.usefixtures("without_cuda")
def test_a_shape_is_captured_after_some_eager_calls_and_other_shapes_stay_eager() -> None:
    function = GraphedFunction(double, CPU)
    for _ in range(EAGER_CALLS):
        assert function(batch(2)).keys() == {"image"}
    assert function(batch(2))["replayed"] == 8
    assert function(batch(3)).keys() == {"image"}
    assert function({"image": torch.ones(2, 4, dtype=torch.float64)}).keys() == {"image"}
    assert all(function(batch(5), capture=False).keys() == {"image"} for _ in range(2 * EAGER_CALLS)), "too large"
    first = next(iter(function._graphs.values()))
    function.clear()  # the weights have moved
    assert function(batch(2)).keys() == {"replayed"} and next(iter(function._graphs.values())) is not first


@pytest.mark.usefixtures("without_cuda")
def test_only_a_few_shapes_are_captured_and_their_graphs_are_kept() -> None:
    function = GraphedFunction(double, CPU)
    for rows in range(1, MOST_GRAPHS + 3):
        for _ in range(EAGER_CALLS + 1):
            function(batch(rows))
    assert [key[0][1][0] for key in function._graphs] == list(range(1, MOST_GRAPHS + 1))


def test_nothing_is_captured_while_the_memory_is_almost_full(without_cuda: pytest.MonkeyPatch) -> None:
    free = [10]
    without_cuda.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 100))
    function = GraphedFunction(double, CPU, min_free=0.25)
    assert all(function(batch(2)).keys() == {"image"} for _ in range(EAGER_CALLS + 2))
    free[0] = 30
    assert function(batch(2)).keys() == {"replayed"}


def test_a_failed_capture_is_noted_and_the_forward_pass_stays_eager(without_cuda: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")

    without_cuda.setattr(graphed_function, "CapturedGraph", fail)
    function = GraphedFunction(double, CPU)
    for _ in range(6):
        made = function(batch(2))
    assert made.keys() == {"image"} and torch.equal(made["image"], torch.full((2, 4), 2.0))
    assert function.note == (
        "CUDA graphs: off, because a capture failed (RuntimeError: operation not permitted when stream is capturing)"
    )
