"""A real MLflow server with a SQLite database, which tests can kill and restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from running import free_port, wait_until

from paceline.core.watch import die_with_parent

START_SECONDS = 240.0  # the server takes long to start on a busy machine


class MlflowServer:
    """An MLflow server on a fixed port; `start` works again after `kill`, with the same database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for commands that log to this server; the server ignores the user name and the password."""
        address = f"http://someone:hunter2@127.0.0.1:{self.port}"
        return {"MLFLOW_TRACKING_URI": address, "MLFLOW_DISABLE_TELEMETRY": "true"}

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        options: dict[str, Any] = {"start_new_session": True, "preexec_fn": die_with_parent}
        options["env"] = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # starts many processes
        with (self.folder / "server.txt").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, **options)
        try:
            wait_until(self.answers, seconds=START_SECONDS)
        except AssertionError:
            self.kill()
            raise

    def answers(self) -> bool:
        assert self.process.poll() is None, (self.folder / "server.txt").read_text()
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def kill(self) -> None:
        """Kill the server and its workers, as a crash of its machine would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
