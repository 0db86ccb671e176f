"""The flight recorder keeps the last collective operations, and a diagnosis reports the rank that did not arrive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from paceline.core.watch import CAPACITY, FlightRecorder, Operation, Record, Witness, diagnose

STEP = ("norm", "norm", "gradients", "norm, backward", "norm, backward")


def witness(rank: int, *names: str, first_step: int = 0, condition: str = "") -> Witness:
    """Return a rank that ran these operations after two complete steps."""
    steps = [(0, name) for name in STEP] + [(1, name) for name in STEP] + [(2 + first_step, name) for name in names]
    operations = tuple(Operation(number, step, name) for number, (step, name) in enumerate(steps, start=1))
    return Witness(Record(rank, 4, True, "", operations), condition)


def blamed(*witnesses: Witness) -> tuple[int, ...]:
    found = diagnose(witnesses)
    return found.ranks if found else ()


def test_the_ranks_that_did_not_arrive_are_named() -> None:
    skips = witness(1, "norm", "gradients", "norm, backward")
    for witnesses, ranks in (
        ([witness(0, "norm", "norm"), witness(1, "norm")], (1,)),
        ([witness(0), witness(1, "norm"), witness(2, "norm"), witness(3)], (0, 3)),
        # a stopped rank, even if no rank is behind
        ([witness(0, "norm"), witness(1, "norm", condition="is stopped")], (1,)),
        # a rank that skips an operation, although it is ahead
        ([witness(0, "norm", "norm"), skips], (1,)),
        ([witness(0, "norm", "norm", "gradients"), skips], (1,)),
        ([witness(0, *STEP), skips, witness(2, *STEP)], (1,)),
        # a rank that skips the rest of a step
        ([witness(0, "norm", first_step=1), witness(1, "norm")], (0,)),
        ([witness(0, "norm"), witness(1, "norm")], ()),
        ([witness(0, "norm")], ()),
    ):
        assert blamed(*witnesses) == ranks, witnesses


def test_the_message_names_the_operation_and_the_last_one_of_the_missing_rank() -> None:
    found = diagnose([witness(0, "norm", "norm"), witness(1, "norm")])
    assert found and "rank 1 did not arrive at 'norm' (step 2, operation 12)" in found.message
    assert "after 'norm' (step 2, operation 11)" in found.message


def test_a_rank_that_did_not_exchange_all_gradients_is_named_although_it_is_ahead() -> None:
    part = "gradients, without head.weight, head.bias"
    ahead = witness(1, "norm", "norm", part, "gather")
    for waiting in (witness(0, "norm", "norm", "gradients"), witness(0, *STEP)):
        found = diagnose([waiting, ahead])
        assert found and found.ranks == (1,)
        assert "rank 1 did not arrive at 'gradients' (step 2, operation 13): the loss on rank 1" in found.message
        assert "did not use head.weight, head.bias; " in found.message
    assert blamed(witness(0, "norm", "norm", part), ahead, witness(2, "norm", "norm", "gradients")) == (0, 1)
    assert blamed(witness(0, "norm", "norm", part), witness(1, "norm", "norm", part)) == ()


def test_the_recorder_keeps_the_last_operations_in_order() -> None:
    recorder = FlightRecorder()
    recorder.set_rank(rank=3, size=8)
    recorder.where = "generator"
    for step in range(CAPACITY + 10):
        recorder.step = step
        recorder.start("gradients")
    record = recorder.record()
    assert (record.rank, record.size, len(record.operations)) == (3, 8, CAPACITY)
    assert [one.step for one in record.operations] == list(range(10, CAPACITY + 10))
    assert record.last == Operation(CAPACITY + 10, CAPACITY + 9, "generator: gradients")


def test_an_operation_can_be_renamed_while_it_is_in_the_record() -> None:
    recorder = FlightRecorder()
    number = recorder.start("gradients")
    recorder.start("norm, backward")
    recorder.rename(number, "gradients, without head.bias")
    assert [one.name for one in recorder.record().operations] == [
        *("start-up: gradients, without head.bias", "start-up: norm, backward")
    ]
    for _ in range(CAPACITY):
        recorder.start("sum")
    before = recorder.record()
    recorder.rename(number, "gradients")
    assert recorder.record() == before


def test_the_record_of_a_killed_process_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    code = (
        "import os, signal\n"
        "from paceline.core.watch import recorder\n"
        "recorder().set_rank(1, 2); recorder().start('sum')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PACELINE_FLIGHT_RECORD": str(path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == -signal.SIGKILL
    record = Record.read(path)
    assert record and record.rank == 1 and record.last == Operation(1, -1, "start-up: sum")


def test_a_damaged_record_is_ignored_or_partly_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    recorder = FlightRecorder(str(path))
    for _ in range(3):
        recorder.start("sum")
    content = path.read_bytes()
    path.write_bytes(content[:100])
    assert Record.read(path) is None
    path.write_bytes(content.replace(b"start-up: sum", b"\xff" * 13))
    record = Record.read(path)
    assert record and len(record.operations) == 3
    assert Record.read(tmp_path / "missing") is None


def test_a_process_records_its_operations_even_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    recorder = FlightRecorder(str(tmp_path / "missing folder" / "record"))
    recorder.set_rank(1, 2)
    recorder.start("gather")
    assert recorder.record().rank == 1 and [operation.number for operation in recorder.record().operations] == [1]
