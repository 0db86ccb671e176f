"""Slow modules are imported in the background, and processes are forked only afterwards."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from threading import Event, Timer

from paceline.config.settings import RunSettings
from paceline.core.background_import import finish_imports, import_in_background
from paceline.data.sources.digits import Digits
from paceline.data.tickets import in_order
from paceline.data.worker_pool import WorkerPool

LOAD = """
import sys, torch
from paceline.core.background_import import finish_imports, import_in_background
from paceline.parallel.torch_internals import load_compiler
import_in_background(load_compiler)
network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
for _ in range(20):
    network(torch.randn(2, 3, 64, 64)).sum().backward()
finish_imports()
assert "torch._inductor.compile_fx" in sys.modules
from torch._inductor.codecache import CacheBase
assert CacheBase.get_system.cache_info().currsize == 1
"""


def wait_for(event: Event) -> None:
    event.wait(60)


def test_the_compiler_is_imported_while_a_network_is_computed() -> None:
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_loader_processes_are_forked_after_an_import_in_the_background() -> None:
    imported = Event()
    import_in_background(partial(wait_for, imported))
    Timer(0.5, imported.set).start()
    pool = WorkerPool(Digits("train", RunSettings()), num_workers=1)
    for batch in pool.read([in_order(0, 2)]):
        assert imported.is_set() and len(batch["image"]) == 2
    finish_imports()


def test_a_process_that_reads_without_workers_does_not_wait_for_an_import() -> None:
    imported = Event()
    import_in_background(partial(wait_for, imported))
    pool = WorkerPool(Digits("train", RunSettings()), num_workers=0)
    assert len(list(pool.read([in_order(0, 2)]))) == 1 and not imported.is_set()
    imported.set()
    finish_imports()
