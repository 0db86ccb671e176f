"""All uses of private torch APIs, except the tables of nn.Module, are here: a new torch release breaks nothing else.

Each docstring states what the public API lacks. tests/parallel/test_torch_internals.py checks that every internal
exists with the expected signature, and its failures list the features that would break.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore as TCPStore  # torch.distributed does not export this type
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.profiler import profile
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm  # torch has no public BatchNorm base class
from torch.nn.modules.dropout import _DropoutNd as AnyDropout  # torch has no public dropout base class
from torch.optim import Optimizer
from torch.profiler import profile as public_profile
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "AnyBatchNorm",
    "AnyDropout",
    "ElasticAgent",
    "FakeTensor",
    "FakeTensorMode",
    "TCPStore",
    "TorchDispatchMode",
    "adam_update",
    "allow_recompilations",
    "compiled_call",
    "copy_all",
    "end_broken_capture",
    "has_exchanged_gradients",
    "has_no_result",
    "is_view",
    "lerp_all",
    "local_address",
    "local_collectives",
    "norms_of",
    "own_generator_state",
    "real_tensors",
    "start_compile_workers",
    "start_trace",
    "stop_heartbeats",
    "undecorated",
    "undo_compile",
]

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
DECORATED = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")  # methods of optimizers


class ElasticAgent(LocalElasticAgent):
    """torchrun's agent with four hooks; torch has no callbacks for workers and for losing the rendezvous."""

    def before_start(self) -> None:
        """Prepare for starting workers; called before each start and restart."""

    def before_monitoring(self) -> None:
        """Look at the workers; when torch finds a failed worker, it ends the others immediately."""

    def review(self, result: RunResult) -> RunResult:
        """Return the result to act on, given the result of monitoring the workers."""
        return result

    def on_loss(self) -> None:
        """Handle the loss of the rendezvous; the workers are still running."""

    @property
    def remaining_restarts(self) -> int:
        """The number of restarts left; torch does not expose its counter."""
        return int(self._remaining_restarts)

    @remaining_restarts.setter
    def remaining_restarts(self, count: int) -> None:
        self._remaining_restarts = count

    def num_hosts_waiting(self) -> int:
        """Return how many hosts are waiting to join; torch checks this only after it checks the workers' state."""
        return int(self._worker_group.spec.rdzv_handler.num_nodes_waiting())

    def stop_workers(self) -> None:
        """Send SIGTERM to the workers, and wait until they have ended; torch has no public way to do so."""
        self._shutdown()

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except (RendezvousError, dist.DistError):
            # Without the rendezvous, each heartbeat prints a warning. Stopping them can wait for one that hangs.
            Thread(target=stop_heartbeats, args=[self._worker_group.spec.rdzv_handler], daemon=True).start()
            self.on_loss()
            raise

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        self.before_start()
        super()._initialize_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.before_monitoring()
        return self.review(super()._monitor_workers(worker_group))


def local_address(handler: DynamicRendezvousHandler) -> str:
    """Return the address under which a rendezvous lists this host; torch does not expose it."""
    return str(handler._this_node.addr)


def stop_heartbeats(handler: DynamicRendezvousHandler) -> None:
    """Leave a rendezvous without closing it for other hosts; torch's `shutdown` also closes it."""
    handler._stop_heartbeats()


@contextmanager
def local_collectives() -> Iterator[list[int]]:
    """Replace all_reduce and all_gather_into_tensor with local versions; yield a list of each call's size in bytes.

    torch cannot run one process's collectives without its peers.
    """
    sizes: list[int] = []
    all_reduce, all_gather = dist.all_reduce, dist.all_gather_into_tensor

    def reduce_alone(tensor: Tensor, *_: object, **__: object) -> None:
        sizes.append(tensor.numel() * tensor.element_size())

    def gather_alone(output: Tensor, own: Tensor, *_: object, **__: object) -> None:
        reduce_alone(own)
        output.zero_()[: own.numel()] = own

    dist.all_reduce, dist.all_gather_into_tensor = reduce_alone, gather_alone  # type: ignore[assignment]
    try:
        yield sizes
    finally:
        dist.all_reduce, dist.all_gather_into_tensor = all_reduce, all_gather


def compiled_call(network: nn.Module) -> object | None:
    """Return what `Module.compile` set, or None if the network is not compiled; torch has no public way to ask."""
    found: object | None = network._compiled_call_impl
    return found


def undo_compile(network: nn.Module) -> None:
    """Undo `Module.compile`; torch has no public way to do so."""
    network._compiled_call_impl = None


def allow_recompilations(count: int) -> None:
    """Compile a function for up to `count` shapes; torch's setting is only available in a private module."""
    from torch._dynamo import config  # imported here because the import takes seconds

    config.recompile_limit = max(count, config.recompile_limit)


def start_compile_workers() -> None:
    """Start the processes in which torch compiles Triton kernels, without waiting for them.

    torch starts them itself, but only after it has traced the first network, and compiles kernels in this process until
    they are ready. There is no public way to start them earlier.
    """
    with suppress(ImportError, OSError):  # compiling works without them
        from torch._inductor.async_compile import maybe_warm_pool  # imported here because the import takes seconds

        maybe_warm_pool()


def end_broken_capture(pool: tuple[int, int], device: torch.device) -> None:
    """Reset the allocator and generator after a failed CUDA graph capture; torch before 2.12 does not reset them."""
    torch.cuda.synchronize(device)
    number = device.index or 0
    with suppress(RuntimeError):  # newer versions of torch have already done this
        torch._C._cuda_endAllocateToPool(number, pool)
    generator = torch.cuda.default_generators[number]
    fresh = torch.Generator(device).manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())


@contextmanager
def own_generator_state(device: torch.device) -> Iterator[None]:
    """Give a GPU's default generator another state inside the context.

    Captured graphs read the state that was current during their capture, so a graph that is captured in the context, or
    fails to be captured, does not affect graphs captured before it.
    """
    generator = torch.cuda.default_generators[device.index or 0]
    before = generator.graphsafe_get_state()
    fresh = torch.Generator(device).manual_seed(generator.initial_seed())
    generator.graphsafe_set_state(fresh.graphsafe_get_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(before)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy many tensors using only a few kernels; torch has no public multi-tensor operations."""
    torch._foreach_copy_(list(targets), list(sources))


def lerp_all(targets: Sequence[Tensor], ends: Sequence[Tensor], weight: float | Tensor) -> None:
    """Interpolate many tensors towards others in a few kernels; a weight in a tensor can change in a captured step."""
    if isinstance(weight, Tensor):
        difference = torch._foreach_sub(list(ends), list(targets))
        torch._foreach_mul_(difference, weight)
        torch._foreach_add_(list(targets), list(difference))
    else:
        torch._foreach_lerp_(list(targets), list(ends), weight)


def adam_update(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    steps: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    *,
    made: float | list[Tensor],
    rate: Tensor,
    beta1: float,
    beta2: Tensor,
    root_factor: Tensor,
    epsilon: float,
) -> None:
    """Update parameters and their Adam state in a few kernels, with numbers in tensors; `made` is added to `steps`."""
    gradients, means, squares = list(gradients), list(means), list(squares)
    torch._foreach_add_(list(steps), made)
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, torch._foreach_mul(gradients, 1 - beta2), gradients)
    roots = torch._foreach_sqrt(squares)
    torch._foreach_mul_(roots, root_factor)
    torch._foreach_add_(roots, epsilon)
    changes = torch._foreach_div(means, roots)
    torch._foreach_mul_(changes, -rate)
    torch._foreach_add_(list(parameters), changes)


def has_exchanged_gradients(wrapper: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether the last backward pass exchanged all gradients; torch has no public way to ask."""
    with suppress(RuntimeError):
        wrapper._check_reducer_finalized()
        return True
    return False


def start_trace(device: torch.device) -> profile:
    """Start a trace like torch.profiler, which first imports torch's compiler; the import takes a second or more."""
    config = _ExperimentalConfig()
    if hasattr(config, "trace_only"):  # absent in torch 2.11; without events for Python, a trace ends sooner
        config.trace_only = True
    on_gpu = device.type == "cuda"
    trace = profile(use_kineto=True, use_device="cuda" if on_gpu else None, experimental_config=config)
    trace.__enter__()
    if ranks := public_profile._get_distributed_info(trace):  # type: ignore[arg-type]  # it does not use its argument
        torch.autograd._add_metadata_json("distributedInfo", json.dumps(ranks, default=str))
    return trace


def norms_of(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norm of each tensor, using only a few kernels; see `copy_all`."""
    return list(torch._foreach_norm(list(tensors), order))


def undecorated(optimizer: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """Return the same optimizer without the decorators that import torch's compiler, which takes two seconds.

    The decorators only matter if the optimizer itself is compiled. Like the original, a step records no gradients.
    """
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in DECORATED}
    methods["step"] = torch.no_grad()(methods["step"])
    return type(optimizer.__name__, (optimizer,), methods)


def is_view(operation: Any) -> bool:
    """Return whether the result of a dispatched operation shares the memory of an argument."""
    return bool(operation.is_view)


def real_tensors() -> AbstractContextManager[object]:
    """Return a context inside a FakeTensorMode in which tensors are real; torch has no public way to leave a mode."""
    return _disable_current_modes()


def has_no_result(operation: Any) -> bool:
    """Return whether an operation of a dispatch mode only changes its arguments, such as a fused optimizer's step."""
    return not operation._schema.returns
