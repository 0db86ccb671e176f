"""What an exception from a storage library means: a file is missing, or its server does not answer."""

from __future__ import annotations

import socket

import pytest

from paceline.core.storage.files import cause_of, is_lasting, open_file_system, unreadable


class HttpError(Exception):
    """An error with a status, as the library aiohttp raises it."""

    __module__ = "aiohttp.client_exceptions"

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class NoSuchKey(Exception):
    """The error of an S3 server for a missing object, as the library botocore raises it."""

    __module__ = "botocore.errorfactory"


def missing(cause: Exception) -> FileNotFoundError:
    """Return the exception with which fsspec hides another one."""
    error = FileNotFoundError("data.tar")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("cause", [HttpError(503), HttpError(429), ConnectionRefusedError(), TimeoutError()])
def test_a_server_that_does_not_answer_is_asked_again(cause: Exception) -> None:
    assert cause_of(missing(cause)) is cause
    assert not is_lasting(cause)


@pytest.mark.parametrize("cause", [HttpError(404), NoSuchKey()])
def test_a_file_that_the_server_does_not_have_is_missing(cause: Exception) -> None:
    error = missing(cause)
    assert cause_of(error) is error
    assert is_lasting(error)


@pytest.mark.parametrize(
    ("status", "expected"), [(401, "access denied"), (403, "access denied"), (400, "cannot be read")]
)
def test_a_request_that_the_server_rejects_is_not_reported_as_a_missing_file(status: int, expected: str) -> None:
    cause = cause_of(missing(HttpError(status)))
    assert is_lasting(cause) and expected in str(unreadable("URL", cause))


def test_an_s3_server_that_does_not_answer_is_reported_after_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in (("ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}"), ("ACCESS_KEY_ID", "key")):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        files, path = open_file_system("s3://bucket/data.tar", "URL")
        with pytest.raises(Exception, match=r"(?i)time"):
            files.info(path)
        silent.settimeout(0.1)
        with pytest.raises(TimeoutError):
            for _ in range(2 * files.retries + 1):  # `info` sends two kinds of requests
                silent.accept()
