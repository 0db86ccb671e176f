"""Decodes and crops image files with NVIDIA DALI, in DALI's own threads.

On a CPU, the pixels are bit-identical to Pillow's. For training on a GPU, data that consists only of JPEG files is
decoded on the GPU, and pixels differ by at most one or two grey levels. Other data is still decoded on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import from_dlpack

from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError, install_extra
from paceline.core.ordered_map import ordered_map
from paceline.data.file_lists import unreadable
from paceline.data.loader import Batches, ReusingLoader
from paceline.data.source import Encoded, sizes_of, stack
from paceline.data.stream import Tickets, channels_first, ratio_of, upload, windows
from paceline.images.decode import BadImage, opened

PLAIN_MODES = ("1", "L", "P", "RGB", "YCbCr", "CMYK")  # Pillow modes with up to 8 bits and no transparency
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "TIFF", "WEBP")

Inputs = dict[str, list[NDArray[Any]]]  # inputs to a DALI pipeline for one batch, by name
SizedPipeline = tuple[int, Any]  # maximum batch size, and the nvidia.dali.Pipeline, which is untyped


class Dali(ReusingLoader[SizedPipeline]):
    """Loads sources that consist of image files; `workers` is the number of DALI threads."""

    description = "decodes in DALI's own threads"
    package = "nvidia.dali"
    uses_workers = True
    extra = "dali"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _import_dali()
        self.threads = max(1, self.settings.workers)
        self.sizes = sizes_of(self.source)
        self.samples = [self._encoded(index) for index in range(len(self.source))]
        with ThreadPoolExecutor(self.threads) as threads:
            files = [file for sample in self.samples for file in sample.files.values()]
            formats = set(threads.map(_checked_format, files))
        self.on_gpu = self.device.type == "cuda" and formats == {"JPEG"}

    def _encoded(self, index: int) -> Encoded:
        sample = self.source.encoded(index)
        if sample is None:
            raise UserError(
                f"--loader dali: cannot load {self.source.name_of(index)}: only 8-bit RGB image files that are not "
                "resized are supported; use --loader workers"
            )
        return sample

    def _batches(self, requests: Iterator[Tickets]) -> Batches:
        first = next(requests, None)
        if first is None:
            return
        # Later batches on this rank have at most one more sample than the first.
        largest, pipeline = self._borrow(len(first.index) + 1)
        decoding: Tickets | None = None
        with closing(ordered_map(lambda request: (request, self._read(request)), chain([first], requests), 1)) as read:
            for request, inputs in read:
                ready = self._take(pipeline, decoding) if decoding else None
                for name, values in inputs.items():
                    pipeline.feed_input(name, values)
                pipeline.schedule_run()
                decoding = request
                if ready:
                    yield ready
        if decoding:
            yield self._take(pipeline, decoding)
        self._idle.append((largest, pipeline))  # not reached after an early exit, which leaves a batch in the pipeline

    def _read(self, request: Tickets) -> Inputs:
        """Return the bytes of the files, and the position and size of the window in each image."""
        inputs: Inputs = {}
        for index, places in zip(request.index, self._places(request), strict=True):
            for name, file in self.samples[int(index)].files.items():
                inputs.setdefault(name, []).append(_bytes_of(file))
                place = places // ratio_of(name, self.source.spec.scale)
                inputs.setdefault(f"{name} start", []).append(place[:2])
                inputs.setdefault(f"{name} shape", []).append(place[2:])
        return inputs

    def _places(self, request: Tickets) -> NDArray[np.int32]:
        """Return top, left, height and width of the region to read from each "image"."""
        sizes = self.sizes[request.index]
        if self.crop:
            places = windows(request.uniforms, sizes, self.crop, self.source.spec.scale)
            return np.array(places, dtype=np.int32)
        return np.concatenate([np.zeros_like(sizes), sizes], axis=1).astype(np.int32)

    def _borrow(self, largest_batch: int) -> SizedPipeline:
        for number, (largest, _) in enumerate(self._idle):
            if largest >= largest_batch:
                return self._idle.pop(number)
        return largest_batch, self._pipeline(largest_batch)

    def _pipeline(self, largest_batch: int) -> Any:
        fn, types, pipeline_class = _import_dali()
        device_id = (self.device.index or 0) if self.on_gpu else None
        pipeline = pipeline_class(largest_batch, self.threads, device_id, prefetch_queue_depth=1)
        with pipeline:
            images = [
                fn.decoders.image_slice(
                    fn.external_source(name=name, dtype=types.UINT8, ndim=1),
                    start=fn.external_source(name=f"{name} start", dtype=types.INT32, ndim=1),
                    shape=fn.external_source(name=f"{name} shape", dtype=types.INT32, ndim=1),
                    axes=(0, 1),
                    device="mixed" if self.on_gpu else "cpu",
                    output_type=types.RGB,
                    jpeg_fancy_upsampling=True,  # matches libjpeg, which Pillow uses
                )
                for name in self.samples[0].files
            ]
            pipeline.set_outputs(*images)
        pipeline.build()
        return pipeline

    def _take(self, pipeline: Any, request: Tickets) -> Batch:
        try:
            outputs = pipeline.share_outputs()
        except RuntimeError as error:
            raise self._decoding_error(request) from error
        pairs = zip(self.samples[0].files, outputs, strict=True)
        images = {name: from_dlpack(stacked.as_tensor()).clone() for name, stacked in pairs}
        if self.on_gpu:
            torch.cuda.synchronize(self.device)  # finish the copies before the pipeline overwrites its buffers
        pipeline.release_outputs()
        columns = request._asdict() | stack([self.samples[int(index)].numbers for index in request.index])
        rest = {name: torch.from_numpy(np.ascontiguousarray(column)) for name, column in columns.items()}
        return channels_first((images if self.on_gpu else upload(images, self.device)) | upload(rest, self.device))

    def _decoding_error(self, request: Tickets) -> UserError:
        """Return the error for a batch that DALI cannot decode: Pillow's error if Pillow cannot decode it either."""
        for index in request.index:
            try:
                self.source.read(int(index))
            except UserError as error:
                return error
        names = ", ".join(self.source.name_of(int(index)) for index in request.index[:3])
        return UserError(f"--loader dali: cannot decode the batch that starts with {names}; use --loader workers")


def _bytes_of(file: Path) -> NDArray[np.uint8]:
    try:
        return np.fromfile(file, dtype=np.uint8)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from error


def _import_dali() -> tuple[Any, Any, Any]:
    try:
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
    except ImportError as error:
        raise UserError(
            f"--loader dali: NVIDIA DALI is not installed; {install_extra(Dali.extra)}, or use --loader workers"
        ) from error
    return fn, types, Pipeline


def _checked_format(file: Path) -> str:
    """Return the format of an image file; raise UserError if DALI would decode it differently from Pillow."""
    try:
        with opened(file) as (image, _):
            name, transparent = str(image.format), image.has_transparency_data
            what = "transparency" if transparent else f"mode {image.mode}"
            num_pages = getattr(image, "n_frames", 1)
            what = f"{num_pages} pages" if num_pages > 1 else what
            plain = image.mode in PLAIN_MODES and not transparent and name in FORMATS and num_pages == 1
    except BadImage as error:
        raise unreadable(file, error) from error
    if not plain:
        raise UserError(
            f"--loader dali: {file} ({name}, {what}) would be decoded differently by other loaders; "
            "use --loader workers"
        )
    return name
