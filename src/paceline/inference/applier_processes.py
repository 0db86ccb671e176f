"""Pictures shared out to several processes, each with a device of its own: who is done gets the next one.

A process reads tasks as lines of JSON and answers in the same way: pixels that it has done, then the outcome.
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
from typing import Any

import torch

from paceline.core.errors import UserError
from paceline.core.heartbeat import die_with_parent
from paceline.inference.applier import Applier, How, Outcome, Task


def share_out(how: How, tasks: list[Task], devices: list[str], advance: Callable[[int], None]) -> Iterator[Outcome]:
    """The outcomes as they come; a process that is lost takes only its picture with it."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    processes = [_start(how, device, len(devices)) for device in devices]
    try:
        for process in processes:
            threading.Thread(target=_feed, args=(process, waiting, answers), daemon=True).start()
        left, alive = len(tasks), len(processes)
        while left:
            answer = answers.get()
            if isinstance(answer, int):
                advance(answer)
            elif isinstance(answer, Outcome):
                left -= 1
                yield answer
            elif isinstance(answer, UserError):
                raise answer
            else:  # a process has ended
                alive -= 1
                if not alive:  # nobody works on what waits
                    yield from (Outcome(task.path, problem="all processes had ended") for task in _taken(waiting))
                    return
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(how: How, device: str, share: int) -> subprocess.Popen[str]:
    words = [json.dumps(asdict(how)), device, str(share)]
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.inference.applier_processes", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal's Ctrl-C is for the one that started it
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def _feed(process: subprocess.Popen[str], waiting: queue.SimpleQueue[Task], answers: queue.SimpleQueue[Any]) -> None:
    """Gives a process one task after the other and passes on what it answers."""
    assert process.stdin and process.stdout
    for task in _taken(waiting):
        outcome = None
        try:
            print(json.dumps(asdict(task)), file=process.stdin, flush=True)
            for line in process.stdout:
                answer = json.loads(line)
                if "mistake" in answer:
                    answers.put(UserError(answer["mistake"]))
                    return
                if "pixels" in answer:
                    answers.put(answer["pixels"])
                    continue
                outcome = Outcome(**answer)
                break
        except OSError:  # it is gone
            pass
        if outcome is None:
            code = process.wait()
            answers.put(Outcome(task.path, problem=f"the process that worked on it ended (exit code {code})"))
            break
        answers.put(outcome)
    answers.put(None)


def _taken(waiting: queue.SimpleQueue[Task]) -> Iterator[Task]:
    """One task after the other, as long as there are some."""
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def main() -> int:
    settings, device, share = sys.argv[1:]
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer

    def reply(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=replies, flush=True)

    try:
        if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(share)))
        applier = Applier(How(**json.loads(settings)), None, torch.device(device), int(share))
        for line in sys.stdin:
            reply(asdict(applier.do(Task(**json.loads(line)), lambda pixels: reply({"pixels": pixels}))))
    except UserError as mistake:
        reply({"mistake": str(mistake)})
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
