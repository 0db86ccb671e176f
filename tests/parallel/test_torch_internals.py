"""The private torch APIs that Paceline uses exist as expected, and only one file uses them."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import fake_tensor
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.nn.modules import batchnorm, dropout

from paceline.launch.rendezvous import Rendezvous
from paceline.parallel import torch_internals
from paceline.parallel.torch_internals import (
    FakeTensorMode,
    has_no_result,
    is_view,
    local_address,
    local_collectives,
    real_tensors,
    stop_heartbeats,
    undecorated,
    undo_compile,
)

SOURCE = Path(torch_internals.__file__).parents[1]


AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
HANDLER = "torch.distributed.elastic.rendezvous.dynamic_rendezvous.DynamicRendezvousHandler"
RESTARTS = "restarts after a worker dies (--max-restarts)"
CAPTURE = "training continues eagerly where a step cannot be captured (--graph auto)"
EXCHANGE = "`paceline plan`, which times steps without exchange"
EMA = "EMA updates and the check that weights are finite"
TRACED = "receptive fields, which `paceline apply` cuts images into tiles by; `paceline plan --memory`"
PROFILE = "--profile"
BATCHNORM = "BatchNorm over all processes on CPUs and under gradient penalties"

# What stops working without each function. "…" stands for further parameters; without parentheses, any are accepted.
FUNCTIONS = {
    f"{AGENT}._monitor_workers(self, worker_group)": RESTARTS,
    f"{AGENT}._initialize_workers(self, worker_group)": f"{RESTARTS}: each round must start with an empty mailbox",
    f"{AGENT}._invoke_run(self, role)": f"{RESTARTS}: the rendezvous host may be lost and return",
    f"{AGENT}._shutdown(self, death_sig, timeout)": f"{RESTARTS}: the rendezvous host may be lost and return",
    f"{HANDLER}._stop_heartbeats(self)": "a host that stops while the others continue",
    "torch.distributed.all_reduce(tensor, …)": EXCHANGE,
    "torch.distributed.all_gather_into_tensor(output_tensor, input_tensor, …)": EXCHANGE,
    "torch.nn.parallel.DistributedDataParallel._check_reducer_finalized(self)": "the error for unused parameters",
    "torch.distributed.distributed_c10d._get_default_store()": f"{PROFILE} with several ranks",
    "torch.Generator.graphsafe_get_state": CAPTURE,
    "torch.Generator.graphsafe_set_state": CAPTURE,
    "torch.nn.modules.dropout._DropoutNd": "`paceline verify`, which sets dropout to 0",
    "torch.nn.modules.batchnorm._BatchNorm(num_features, eps, momentum, affine, track_running_stats, …)": BATCHNORM,
    "torch._foreach_copy_": "replays of a captured step (--graph)",
    "torch._foreach_lerp_": EMA,
    "torch._foreach_norm": EMA,
    "torch.utils._python_dispatch.TorchDispatchMode.__torch_dispatch__(self, func, types, args, kwargs)": TRACED,
    "torch.utils._python_dispatch._disable_current_modes()": "`paceline plan --memory` of networks that read tensors",
    "torch._C._profiler._ExperimentalConfig": PROFILE,
    "torch.profiler.profile._get_distributed_info(self)": PROFILE,
    "torch.autograd._add_metadata_json": PROFILE,
}


@pytest.mark.parametrize("signature", FUNCTIONS)
def test_torch_has_the_functions_that_paceline_uses(signature: str) -> None:
    name, _, listed = signature.partition("(")
    function, expected = locate(name), listed.removesuffix(")").replace(", …", "")
    changed = f"torch {torch.__version__} changed {signature}, so this stops working: {FUNCTIONS[signature]}"
    assert function is not None, changed
    if listed:
        parameters = list(inspect.signature(function).parameters)
        assert ", ".join(parameters[: expected.count(",") + 1] if "…" in listed else parameters) == expected, changed


def test_torch_has_the_attributes_that_paceline_uses() -> None:
    handler = Rendezvous().open()
    try:
        spec = WorkerSpec(role="x", local_world_size=1, rdzv_handler=handler, entrypoint="true", max_restarts=3)
        agent: Any = LocalElasticAgent(spec, DefaultLogsSpecs())
        assert agent._remaining_restarts == 3, RESTARTS
        assert agent._worker_group.spec.rdzv_handler.num_nodes_waiting() == 0, "hosts that join a run later"
        assert isinstance(handler._this_node.addr, str), "every run in several processes"
        assert local_address(handler)
        stop_heartbeats(handler)
        assert not handler.is_closed(), "a process can leave a rendezvous without closing it"
    finally:
        handler.shutdown()
    assert torch_internals.TCPStore is dist.TCPStore, "every run in several processes"
    assert nn.Linear(1, 1)._compiled_call_impl is None, "training continues eagerly where --compile fails"
    assert importlib.import_module("torch._dynamo.config").recompile_limit >= 8, "--compile of blocks with many shapes"
    assert all(hasattr(getattr(torch.optim.Adam, name), "__wrapped__") for name in torch_internals.DECORATED)
    assert not torch.cuda.is_available() or callable(torch._C._cuda_endAllocateToPool), CAPTURE
    assert issubclass(nn.Dropout2d, dropout._DropoutNd) and issubclass(nn.BatchNorm2d, batchnorm._BatchNorm)
    assert "allow_non_fake_inputs" in inspect.signature(fake_tensor.FakeTensorMode).parameters, TRACED
    assert has_no_result(torch.ops.aten._fused_adam_.default) and not has_no_result(torch.ops.aten.add.Tensor), TRACED
    assert is_view(torch.ops.aten.slice.Tensor) and not is_view(torch.ops.aten.clone.default), TRACED
    with FakeTensorMode(), real_tensors():
        assert torch.ones(2).sum().item() == 2, TRACED


def test_only_one_file_uses_private_torch_names() -> None:
    problems = []
    for file in sorted(SOURCE.rglob("*.py")):
        if file == Path(torch_internals.__file__):
            continue
        text = file.read_text()
        for node in ast.walk(ast.parse(text if re.search(r"(?:torch|dist|nn)\b.*\b_[a-z]", text) else "")):
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
