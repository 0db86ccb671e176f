"""16-bit and floating-point images on a GPU: batches are gathered inside a CUDA graph and equal those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import DataSpec
from paceline.data.loader import BatchPipeline
from paceline.data.loaders.resident import Resident
from paceline.data.loaders.workers import Workers
from paceline.data.source import ArraySource
from paceline.data.stream import Augment, Stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
VALUES = np.random.default_rng(0).integers(0, 65536, (12, 16, 16, 5), dtype=np.uint16)
SOURCES = {
    "uint16": ArraySource({"image": VALUES}, DataSpec(5, 16, 16, dtype="uint16")),
    "float32": ArraySource(
        {"image": (VALUES / np.float32(65535)).astype(np.float32)},
        DataSpec(5, 16, 16, dtype="float32", value_range=(-0.5, 1.5)),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("crop", [0, 8])
def test_batches_of_a_cuda_graph_equal_those_of_the_cpu(name: str, crop: int) -> None:
    source, stream = SOURCES[name], Stream(0, 12)
    augment = Augment(flip=True, rot90=True) if crop else Augment(flip=True, pad_crop=2)
    requests = [stream.take(start, start + 4) for start in range(0, 20, 4)]
    expected = list(BatchPipeline(Resident(source, CPU, RunSettings(), crop), augment, torch.float32).batches(requests))
    pipeline = BatchPipeline(Resident(source, GPU, RunSettings(), crop), augment, torch.float32)
    fetched = list(pipeline.fetch(requests))
    static = {field: tensor.clone() for field, tensor in fetched[0].items()}
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        pipeline.finish(static)  # fills the caches, as in training
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = pipeline.finish(static)
    for one, wanted in zip(fetched, expected, strict=True):
        for field, tensor in static.items():
            tensor.copy_(one[field])
        graph.replay()
        assert torch.equal(made["image"].cpu(), wanted["image"])
    workers = BatchPipeline(Workers(source, GPU, RunSettings(workers=0), crop), augment, torch.float32)
    for batch, wanted in zip(workers.batches(requests), expected, strict=True):
        assert torch.equal(batch["image"].cpu(), wanted["image"])
