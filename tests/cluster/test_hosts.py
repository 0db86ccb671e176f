"""Training on two hosts with separate network namespaces and run folders survives the loss and return of one host."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from holds import Holds
from machines import TINY, Host
from running import (
    TIMEOUT_SECONDS,
    Running,
    has_ended,
    metrics_without_times,
    start_command,
    wait_until,
    weights_of,
    workers_of,
)

from paceline.data.source import open_sources
from paceline.data.stream import Stream
from paceline.runs.finished_run import config_of

IMAGES, BATCH = 3300, 66  # 3,300 images are more than two epochs
SETTINGS = ("--images", str(IMAGES), "--batch-size", str(BATCH), "--set", "save_every=3 steps")
STEPS_UNTIL_HELD = 10  # of 50


class Pair:
    """The same training command, running on two hosts."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path, *more: str) -> None:
        self.hosts, self.folder, self.more = hosts, folder, more
        self.running: list[Running] = []
        self.holds = Holds(folder / "holds")
        self.holds.hold("loss", after=STEPS_UNTIL_HELD)
        for number in range(2):
            (folder / str(number)).mkdir()
            self.running.append(self.start(number))

    def start(self, number: int) -> Running:
        words = ("train", TINY, *SETTINGS, "--rdzv", f"{self.hosts[0].address}:29400", "--out", "run")
        record = ("--set", f"record={self.folder / 'seen'}", "--set", "join_timeout=90", *self.holds.settings)
        folder = self.folder / str(number)
        return start_command(folder, *words, *record, *self.more, before=self.hosts[number].enter)

    def run(self, number: int) -> Path:
        return self.folder / str(number) / "run"

    def lose(self, number: int) -> None:
        """Kill a host's launcher, and wait until its worker processes are gone: one could still finish a step."""
        workers = workers_of(self.running[number].pid).values()
        assert workers
        self.running[number].kill()
        wait_until(lambda: all(map(has_ended, workers)))

    def batches(self) -> dict[int, list[list[int]]]:
        """Return the sorted sample indices in each batch, grouped by the number of processes."""
        found: dict[int, list[list[int]]] = {}
        for file in (self.folder / "seen").iterdir() if (self.folder / "seen").exists() else []:
            size = int(file.name.rpartition("-")[2])
            lines = [sorted(map(int, line.split())) for line in file.read_text().splitlines()]
            found.setdefault(size, []).extend(lines)
        return found

    def count(self, size: int) -> int:
        return len(self.batches().get(size, []))


@pytest.fixture
def pair(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(hosts, tmp_path, "--nnodes", "1:2", "--max-restarts", "5")
    yield pair
    for running in pair.running:
        if not running.ended:
            running.kill()


def is_whole(pair: Pair) -> bool:
    """Check that training used exactly the expected batches, each on one host or split between the two."""
    config = config_of(str(pair.run(0)), trust=True)
    stream = Stream(config.run.seed, len(open_sources(config)["train"]))
    batches = pair.batches()
    alone, shared = (set(map(tuple, batches.get(size, []))) for size in (1, 2))
    expected: set[tuple[int, ...]] = set()
    for start in range(0, IMAGES, BATCH):
        samples = stream.take(start, start + BATCH).index.tolist()
        halves = {tuple(sorted(part)) for part in (samples[: BATCH // 2], samples[BATCH // 2 :])}
        if tuple(sorted(samples)) not in alone and not halves <= shared:
            return False
        expected |= {tuple(sorted(samples)), *halves}
    return alone | shared <= expected


@pytest.mark.parametrize("lost", [1, 0], ids=["other-host", "rendezvous-host"])
def test_a_lost_host_rejoins_and_the_run_finishes(pair: Pair, lost: int) -> None:
    pair.holds.wait_for("loss", pair.running[1 - lost], num_ranks=2)
    pair.lose(lost)
    before = pair.count(2)
    if not lost:  # the remaining process is still held when its launcher stops it
        wait_until(lambda: "lost the rendezvous host" in pair.running[1].stderr, pair.running[1])
    # Otherwise, it takes one more step, which fails. Each process that is started later takes a few steps.
    pair.holds.hold("loss", after=STEPS_UNTIL_HELD + 1)
    if lost:  # the remaining host continues alone
        wait_until(lambda: pair.count(1) > 4, pair.running[0])
    pair.running[lost] = pair.start(lost)
    if lost:  # the remaining process is held when its launcher stops it, and saves after its next step
        wait_until(lambda: "saving a checkpoint after this step" in pair.running[0].stdout, pair.running[0])
        pair.holds.hold("loss", after=STEPS_UNTIL_HELD + 2)
    wait_until(lambda: pair.count(2) > before + 4, pair.running[1 - lost])
    pair.holds.release("loss")
    assert [running.wait(2 * TIMEOUT_SECONDS) for running in pair.running] == [0, 0], [r.stderr for r in pair.running]
    assert weights_of(pair.run(0)) == weights_of(pair.run(1))
    assert is_whole(pair), "a sample was skipped"
    histories = [[row["images"] for row in metrics_without_times(pair.run(number))] for number in range(2)]
    assert histories[0] == histories[1], "the host that returned lacks metrics logged in its absence"


@pytest.mark.parametrize("cuts", [True, False], ids=["link-cut", "rank-stopped"])
def test_hosts_that_cannot_continue_leave_no_processes_behind(
    hosts: tuple[Host, Host], tmp_path: Path, cuts: bool
) -> None:
    pair = Pair(hosts, tmp_path, "--nnodes", "2", "--timeout", "8")
    pair.holds.wait_for("loss", pair.running[0], num_ranks=2)
    workers = [pid for running in pair.running for pid in workers_of(running.pid).values()]
    if cuts:
        hosts[1].cut()
    else:
        (rank,) = workers_of(pair.running[1].pid).values()
        os.kill(rank, signal.SIGSTOP)
    pair.holds.release("loss")
    for running in pair.running:
        assert running.wait() != 0
    assert len(workers) == 2
    wait_until(lambda: all(map(has_ended, workers)))


def test_hosts_listen_only_on_the_network_between_them(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    pair = Pair(hosts, tmp_path, "--nnodes", "2")
    pair.holds.wait_for("loss", pair.running[0], num_ranks=2)
    for number, host in enumerate(hosts):
        assert listeners(host.enter) <= {host.address}, number
    for running in pair.running:
        running.kill(signal.SIGTERM)
    wait_until(lambda: any("saving a checkpoint after this step" in running.stdout for running in pair.running))
    pair.holds.release("loss")
    assert [running.wait() for running in pair.running] == [75, 75]


def listeners(enter: tuple[str, ...]) -> set[str]:
    answer = subprocess.run([*enter, "ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    return {line.split()[3].rpartition(":")[0] for line in answer.splitlines()}
