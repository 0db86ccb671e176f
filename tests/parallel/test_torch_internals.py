"""The private torch APIs that Paceline uses exist as expected, and only one file uses them."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.nn.modules import batchnorm, dropout
from torch.utils import _python_dispatch

from paceline.launch.rendezvous import Rendezvous
from paceline.parallel import torch_internals
from paceline.parallel.torch_internals import (
    FakeTensorMode,
    copy_all,
    has_no_result,
    is_view,
    lerp_all,
    local_address,
    local_collectives,
    norms_of,
    real_tensors,
    stop_heartbeats,
    undecorated,
    undo_compile,
)

SOURCE = Path(torch_internals.__file__).parents[1]


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def agent() -> LocalElasticAgent:
    handler = Rendezvous().open()
    try:
        spec = WorkerSpec(role="x", local_world_size=1, rdzv_handler=handler, entrypoint="true", max_restarts=3)
        return LocalElasticAgent(spec, DefaultLogsSpecs())
    finally:
        handler.shutdown()


def rendezvous_address() -> object:
    handler = Rendezvous().open()
    try:
        return handler._this_node.addr
    finally:
        handler.shutdown()


RESTARTS = "restarts after a worker dies (--max-restarts)"
LEAVING = "a host that stops while the others continue"
CAPTURE = "training continues eagerly where a step cannot be captured (--graph auto)"
EMA = "EMA updates and the check that weights are finite"
TILES = "receptive fields, which `paceline apply` cuts images into tiles by"
MEMORY = "`paceline plan --memory`"
PROFILE = "--profile"

INTERNALS: dict[str, tuple[Callable[[], bool], str]] = {
    "LocalElasticAgent._monitor_workers(worker_group)": (
        lambda: parameters(LocalElasticAgent._monitor_workers) == ["self", "worker_group"],
        RESTARTS,
    ),
    "LocalElasticAgent._initialize_workers(worker_group)": (
        lambda: parameters(LocalElasticAgent._initialize_workers) == ["self", "worker_group"],
        f"{RESTARTS}: each round must start with an empty mailbox",
    ),
    "LocalElasticAgent._invoke_run(role) and _shutdown()": (
        lambda: (
            parameters(LocalElasticAgent._invoke_run) == ["self", "role"]
            and parameters(LocalElasticAgent._shutdown) == ["self", "death_sig", "timeout"]
        ),
        f"{RESTARTS}: the rendezvous host may be lost and return",
    ),
    "LocalElasticAgent._remaining_restarts": (lambda: agent()._remaining_restarts == 3, RESTARTS),
    "LocalElasticAgent._worker_group.spec.rdzv_handler": (
        lambda: agent()._worker_group.spec.rdzv_handler.num_nodes_waiting() == 0,
        "hosts that join a run later (--nnodes MIN:MAX)",
    ),
    "DynamicRendezvousHandler._this_node.addr": (
        lambda: isinstance(rendezvous_address(), str),
        "every run in several processes: workers get their address from it",
    ),
    "DynamicRendezvousHandler._stop_heartbeats()": (
        lambda: parameters(DynamicRendezvousHandler._stop_heartbeats) == ["self"],
        LEAVING,
    ),
    "torch.distributed.all_reduce(tensor, …)": (
        lambda: parameters(dist.all_reduce)[0] == "tensor",
        "`paceline plan`, which times steps without exchange",
    ),
    "torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, …)": (
        lambda: parameters(dist.all_gather_into_tensor)[:2] == ["output_tensor", "input_tensor"],
        "`paceline plan`, which times steps without exchange",
    ),
    "torch.distributed.TCPStore": (
        lambda: torch_internals.TCPStore is dist.TCPStore,
        "every run in several processes: they meet at this store",
    ),
    "DistributedDataParallel._check_reducer_finalized()": (
        lambda: parameters(nn.parallel.DistributedDataParallel._check_reducer_finalized) == ["self"],
        "the error for parameters that a step does not use (--strategy ddp)",
    ),
    "Module._compiled_call_impl": (
        lambda: nn.Linear(1, 1)._compiled_call_impl is None,
        "training continues eagerly where --compile fails",
    ),
    "torch._dynamo.config.recompile_limit": (
        lambda: importlib.import_module("torch._dynamo.config").recompile_limit >= 8,
        "--compile for networks that use one block for many shapes",
    ),
    "Optimizer.step, zero_grad, … with __wrapped__": (
        lambda: all(hasattr(getattr(torch.optim.Adam, name), "__wrapped__") for name in torch_internals.DECORATED),
        "a fast start: training imports torch's compiler only if it is used",
    ),
    "torch._C._distributed_c10d._dump_nccl_trace_json": (
        lambda: not dist.is_nccl_available() or hasattr(torch._C._distributed_c10d, "_dump_nccl_trace_json"),
        "NCCL's record of collective operations after a hang",
    ),
    "torch.distributed.distributed_c10d._get_default_store": (
        lambda: parameters(dist.distributed_c10d._get_default_store) == [],
        "`--profile` with several ranks: waiting for a slower rank is separated from communication",
    ),
    "torch._C._cuda_endAllocateToPool": (
        lambda: not torch.cuda.is_available() or callable(torch._C._cuda_endAllocateToPool),
        CAPTURE,
    ),
    "Generator.graphsafe_get_state, graphsafe_set_state": (
        lambda: hasattr(torch.Generator, "graphsafe_get_state") and hasattr(torch.Generator, "graphsafe_set_state"),
        CAPTURE,
    ),
    "torch.nn.modules.dropout._DropoutNd": (
        lambda: issubclass(nn.Dropout2d, dropout._DropoutNd) and hasattr(nn.Dropout(0.5), "p"),
        "`paceline verify`, which sets dropout to 0",
    ),
    "torch.nn.modules.batchnorm._BatchNorm": (
        lambda: (
            issubclass(nn.BatchNorm2d, batchnorm._BatchNorm)
            and parameters(batchnorm._BatchNorm)[:5]
            == ["num_features", "eps", "momentum", "affine", "track_running_stats"]
        ),
        "BatchNorm over all processes on CPUs and under gradient penalties",
    ),
    "torch._foreach_copy_": (lambda: callable(torch._foreach_copy_), "replays of a captured step (--graph)"),
    "torch._foreach_lerp_": (lambda: callable(torch._foreach_lerp_), EMA),
    "torch._foreach_norm": (lambda: callable(torch._foreach_norm), EMA),
    "OpOverload.is_view": (lambda: torch.ops.aten.view.default.is_view is True, TILES),
    "FakeTensorMode(allow_non_fake_inputs)": (
        lambda: "allow_non_fake_inputs" in parameters(fake_tensor.FakeTensorMode),
        f"{TILES}; {MEMORY}",
    ),
    "TorchDispatchMode.__torch_dispatch__": (
        lambda: (
            parameters(_python_dispatch.TorchDispatchMode.__torch_dispatch__)[1:] == ["func", "types", "args", "kwargs"]
        ),
        f"{TILES}; {MEMORY}",
    ),
    "torch.utils._python_dispatch._disable_current_modes": (
        lambda: not parameters(_python_dispatch._disable_current_modes),
        f"{MEMORY} for networks that read numbers from tensors when they are built",
    ),
    "torch._C._profiler._ExperimentalConfig()": (lambda: bool(torch._C._profiler._ExperimentalConfig()), PROFILE),
    "torch.profiler.profile._get_distributed_info(self)": (
        lambda: parameters(torch.profiler.profile._get_distributed_info) == ["self"],
        PROFILE,
    ),
    "torch.autograd._add_metadata_json": (lambda: callable(torch.autograd._add_metadata_json), PROFILE),
    "OpOverload._schema.returns": (lambda: len(torch.ops.aten.add.Tensor._schema.returns) == 1, MEMORY),
}


@pytest.mark.parametrize("name", INTERNALS)
def test_torch_has_the_internals_that_paceline_uses(name: str) -> None:
    is_there, what = INTERNALS[name]
    try:
        found = is_there()
    except (AttributeError, TypeError) as error:
        found = False
        name += f" ({error})"
    assert found, (
        f"torch {torch.__version__} changed {name}, so this stops working: {what}; see {torch_internals.__file__}"
    )


def test_only_one_file_uses_private_torch_names() -> None:
    problems = []
    for file in sorted(SOURCE.rglob("*.py")):
        if file == Path(torch_internals.__file__):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if any(part.startswith("_") and not part.startswith("__") for part in _torch_names(node)):
                problems.append(f"{file.relative_to(SOURCE)}:{node.lineno}: {'.'.join(_torch_names(node))}")
    assert not problems, "\n".join(["move these to parallel/torch_internals.py:", *problems])


def _torch_names(node: ast.AST) -> list[str]:
    """Return the dotted torch names in an import or attribute, or an empty list for other nodes."""
    match node:
        case ast.Import(names=names):
            return [part for one in names if one.name.split(".")[0] == "torch" for part in one.name.split(".")]
        case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "torch":
            return [*module.split("."), *(one.name for one in names)]
        case ast.Attribute():
            parts: list[str] = []
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute):
                parts.insert(0, inner.attr)
                inner = inner.value
            return parts if isinstance(inner, ast.Name) and inner.id in ("torch", "dist", "nn") else []
    return []


@pytest.mark.parametrize(
    "text", ["import torch._C", "from torch.nn.modules.batchnorm import _BatchNorm", "torch._foreach_copy_(a, b)"]
)
def test_a_private_torch_name_in_another_file_is_reported(text: str) -> None:
    assert any(part[0] == "_" for node in ast.walk(ast.parse(text)) for part in _torch_names(node))


def test_a_process_can_leave_a_rendezvous_without_closing_it() -> None:
    handler = Rendezvous().open()
    assert local_address(handler)
    stop_heartbeats(handler)
    assert not handler.is_closed()
    handler.shutdown()
    assert handler.is_closed()


def test_simulated_collectives_need_no_process_group_and_count_bytes() -> None:
    own, parts = torch.arange(3.0), torch.ones(6)
    before = dist.all_reduce, dist.all_gather_into_tensor
    with local_collectives() as sizes:
        dist.all_reduce(own)
        dist.all_gather_into_tensor(parts, own)
    assert sizes == [12, 12]
    assert own.tolist() == [0, 1, 2] and parts.tolist() == [0, 1, 2, 0, 0, 0]
    assert (dist.all_reduce, dist.all_gather_into_tensor) == before


def test_compilation_of_a_module_can_be_undone() -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        calls.append(graph)
        return graph.forward

    network = nn.Linear(2, 2)
    network.compile(backend=backend)
    undo_compile(network)
    network(torch.ones(1, 2))
    assert not calls


def test_operations_on_lists_of_tensors_equal_operations_on_each_tensor() -> None:
    ours, theirs = [torch.zeros(2), torch.ones(3)], [torch.full((2,), 4.0), torch.full((3,), -3.0)]
    lerp_all(ours, theirs, 0.25)
    assert [one.tolist() for one in ours] == [[1.0] * 2, [0.0] * 3]
    assert [one.item() for one in norms_of(theirs, float("inf"))] == [4.0, 3.0]
    copy_all(ours, theirs)
    assert all(map(torch.equal, ours, theirs))


def test_a_view_is_distinguished_from_a_copy() -> None:
    assert is_view(torch.ops.aten.slice.Tensor) and not is_view(torch.ops.aten.clone.default)


def test_operations_that_only_change_their_arguments_have_no_result() -> None:
    assert has_no_result(torch.ops.aten._fused_adam_.default)
    assert not has_no_result(torch.ops.aten.add.Tensor)


def test_tensors_can_be_real_inside_a_fake_mode() -> None:
    with FakeTensorMode():
        with real_tensors():
            assert torch.ones(2).sum().item() == 2
        assert isinstance(torch.ones(2), fake_tensor.FakeTensor)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_undecorated_optimizer_computes_the_same_weights(optimizer: Any) -> None:
    results = []
    for kind in (optimizer, undecorated(optimizer)):
        torch.manual_seed(0)
        network = nn.Linear(3, 2)
        chosen = kind([{"params": [network.weight], "lr": 0.3}, {"params": [network.bias]}], lr=0.1, fused=True)
        for _ in range(3):
            network(torch.ones(4, 3)).square().sum().backward()
            chosen.step()
            chosen.zero_grad(set_to_none=True)
        assert network.weight.grad is None
        results.append(torch.cat([network.weight.flatten(), network.bias, *_state(chosen)]))
    assert torch.equal(*results)


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value.flatten()
        for one in optimizer.state_dict()["state"].values()
        for value in one.values()
        if value is not None
    ]
