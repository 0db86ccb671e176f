"""The rank of a process and the address of its group, from the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.core.errors import UserError
from paceline.parallel.group import Place, meeting_point, place_from, serve_store, slurm_rendezvous

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
SRUN = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (TORCHRUN, Place(rank=5, size=8, local_rank=1, local_size=4, num_nodes=2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, local_rank=0, local_size=1, num_nodes=2)),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, None),  # inside a batch script, without srun
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        (
            SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
            Place(rank=3, size=7, local_rank=1, local_size=2, num_nodes=4),
        ),
        (
            SRUN | {"SLURM_PROCID": "6", "SLURM_LOCALID": "0", "SLURM_NODEID": "3"},
            Place(rank=6, size=7, local_rank=0, local_size=1, num_nodes=4),
        ),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, Place(0, 7, 0, local_size=2, num_nodes=4)),
        (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "9"}, Place(0, 7, 0, 2, 4)),
        (
            {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3,1,2", "SLURM_NODEID": "2"}
            | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
            Place(rank=5, size=6, local_rank=1, local_size=2, num_nodes=3),
        ),
    ],
)
def test_the_rank_of_a_process_is_read_from_torchrun_or_slurm_variables(
    environ: dict[str, str], place: Place | None
) -> None:
    assert place_from(environ) == place


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("a,b", "a"),
        ("gpu[07-09],x1", "gpu07"),
        ("gpu[1,3-5]", "gpu1"),
        ("rack[1-2]node[3-4]", "rack1node3"),
        ("gpu[1-2]-ib", "gpu1-ib"),
        ("a1,gpu[1-2]", "a1"),
    ],
)
def test_processes_started_by_srun_connect_through_the_first_host(nodes: str, first: str) -> None:
    assert slurm_rendezvous({"SLURM_STEP_NODELIST": nodes})[0] == first
    assert slurm_rendezvous({"SLURM_NODELIST": nodes})[0] == first


def test_slurm_jobs_and_steps_on_one_host_use_different_ports() -> None:
    def port(job: int, step: int) -> int:
        environ = {"SLURM_NODELIST": "a", "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        return slurm_rendezvous(environ)[1]

    ports = [port(4_000_000 + job, step) for job in range(50) for step in range(20)]
    assert len(set(ports)) == len(ports)
    assert all(10_000 <= one < 20_000 for one in ports)


@pytest.mark.parametrize(
    ("function", "environ", "what"),
    [
        (place_from, {"RANK": "abc", "WORLD_SIZE": "2"}, "RANK is 'abc': expected a whole number from 0 to 1"),
        (place_from, {"RANK": "", "WORLD_SIZE": "2"}, "RANK is ''"),
        (place_from, {"RANK": "2", "WORLD_SIZE": "2"}, "RANK is '2'"),
        (place_from, {"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0': expected a whole number of at least 1"),
        (place_from, TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_WORLD_SIZE is '4'"),
        (place_from, SRUN | {"SLURM_PROCID": "0"}, "SLURM_LOCALID is not set"),
        (place_from, SRUN | {"SLURM_PROCID": "7", "SLURM_LOCALID": "0"}, "SLURM_PROCID is '7'"),
        (meeting_point, {}, "MASTER_ADDR and MASTER_PORT are not"),
        (meeting_point, {"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT is not set"),
        (meeting_point, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "80x"}, "MASTER_PORT is '80x'"),
        (meeting_point, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, "a whole number from 1 to 65535"),
        (meeting_point, {"MASTER_ADDR": "a..b", "MASTER_PORT": "29500"}, "MASTER_ADDR=a..b: this machine cannot find"),
    ],
)
def test_variables_that_no_launcher_would_set_are_reported(
    function: Callable[[dict[str, str]], object], environ: dict[str, str], what: str
) -> None:
    with pytest.raises(UserError) as error:
        function(environ)
    assert what in str(error.value)


def test_processes_meet_at_the_address_that_is_set_or_at_the_first_host_of_a_slurm_step() -> None:
    slurm = {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "1"}
    assert meeting_point(slurm | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}) == ("127.0.0.1", 29500)
    assert meeting_point(slurm) == ("localhost", 10_000 + 7919)


def test_an_interrupt_while_a_store_starts_is_not_replaced_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, master_listen_fd: int, **__: object) -> None:
        os.close(master_listen_fd)  # torch has taken the socket, and closes it when its constructor ends
        raise KeyboardInterrupt

    monkeypatch.setattr(dist, "TCPStore", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve_store("127.0.0.1", 0, timedelta(seconds=5))
