"""Distributes images among worker processes, one per device. A worker gets its next image when it finishes one.

A worker reads tasks as JSON lines and replies with JSON lines: pixel counts while it works, then the outcome.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import TypeAlias

import torch

from paceline.core.errors import UserError
from paceline.core.heartbeat import die_with_parent
from paceline.core.printable import print_any_text
from paceline.core.types import JsonObject
from paceline.inference.applier import AppliedImage, Applier, ApplierSettings, ImageTask
from paceline.inference.skipped import SkippedImage

Outcome: TypeAlias = AppliedImage | SkippedImage
Waiting: TypeAlias = "queue.SimpleQueue[ImageTask]"
# An int counts processed pixels; None means that a process has ended.
Answers: TypeAlias = "queue.SimpleQueue[int | Outcome | UserError | None]"


def apply_in_processes(
    settings: ApplierSettings, tasks: list[ImageTask], devices: list[str], advance: Callable[[int], None]
) -> Iterator[Outcome]:
    """Yield the outcome of each image as it arrives. If a process dies, only its current image is lost."""
    waiting: Waiting = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    answers: Answers = queue.SimpleQueue()
    processes = [_start(settings, device, len(devices)) for device in devices]
    try:
        for process in processes:
            threading.Thread(target=_feed, args=(process, waiting, answers), daemon=True).start()
        left, alive = len(tasks), len(processes)
        while left:
            answer = answers.get()
            if isinstance(answer, int):
                advance(answer)
            elif isinstance(answer, UserError):
                raise answer
            elif answer is not None:
                left -= 1
                yield answer
            else:
                alive -= 1
                if not alive:  # no process is left for the remaining images
                    yield from (
                        SkippedImage(task.path, "all worker processes died before this image was processed")
                        for task in _take_all(waiting)
                    )
                    return
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(settings: ApplierSettings, device: str, share: int) -> subprocess.Popen[str]:
    words = [json.dumps(asdict(settings)), device, str(share)]
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.inference.applier_processes", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that Ctrl-C only reaches the parent process
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def _feed(process: subprocess.Popen[str], waiting: Waiting, answers: Answers) -> None:
    """Send tasks to a process one at a time, and forward its answers."""
    for task in _take_all(waiting):
        outcome = _run_task(task, process, answers)
        if outcome is None:
            code = process.wait()
            answers.put(SkippedImage(task.path, f"the process working on this image died (exit code {code})"))
            break
        answers.put(outcome)
        if isinstance(outcome, UserError):
            return
    answers.put(None)


def _run_task(task: ImageTask, process: subprocess.Popen[str], answers: Answers) -> Outcome | UserError | None:
    """Run a task in a process and forward its progress; return None if the process has died."""
    assert process.stdin and process.stdout
    try:
        print(json.dumps(asdict(task)), file=process.stdin, flush=True)
        for line in process.stdout:
            answer = json.loads(line)
            if "pixels" in answer:
                answers.put(answer["pixels"])
            elif "applied" in answer:
                return AppliedImage(**answer["applied"])
            elif "skipped" in answer:
                return SkippedImage(**answer["skipped"])
            else:
                return UserError(answer["error"])
    except OSError:  # the pipe is broken
        pass
    return None


def _take_all(waiting: Waiting) -> Iterator[ImageTask]:
    """Yield tasks from the queue until it is empty."""
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def main() -> int:
    """Process the tasks that arrive on standard input."""
    print_any_text()
    settings, device, share = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # send other output to stderr, so that it is not mistaken for an answer

    def reply(answer: JsonObject) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    try:
        if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(share)))
        applier = Applier(ApplierSettings(**json.loads(settings)), None, torch.device(device), int(share))
        for line in sys.stdin:
            outcome = applier.process(ImageTask(**json.loads(line)), lambda pixels: reply({"pixels": pixels}))
            reply({"applied" if isinstance(outcome, AppliedImage) else "skipped": asdict(outcome)})
    except UserError as error:
        reply({"error": str(error)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
