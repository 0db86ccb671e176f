"""Credentials are hidden or rejected before text is written or shown. Text without credentials is unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fsspec.exceptions import FSTimeoutError

from paceline.cli.app import run
from paceline.core.text import is_private_name, one_line, redact
from paceline.runs.mirror import Staging


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:word@host/bucket", "s3://***@host/bucket"),
        ("see https://me:p%40ss@a.b/c?x=1 and ftp://u@h", "see https://***@a.b/c?x=1 and ftp://***@h"),
        ("https://a/b?token=abc&x=1", "https://a/b?token=***&x=1"),
        ("https://a/b?X-Amz-Signature=ff00&X-Amz-Date=1", "https://a/b?X-Amz-Signature=***&X-Amz-Date=1"),
        ("aws_secret_access_key = Ab/cd+ef", "aws_secret_access_key = ***"),
        ('{"password": "hunter2", "user": "me"}', '{"password": "***", "user": "me"}'),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ("DefaultEndpoints;AccountKey=abc==;x", "DefaultEndpoints;AccountKey=***;x"),
        (f"{'x' * 100}://me:word@host {'my_' * 99}token=a", f"{'x' * 100}://***@host {'my_' * 99}token=***"),
    ],
)
def test_credentials_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("first\n second"), "ValueError: first second"),
        (ValueError(" "), "ValueError"),
        (FSTimeoutError(), "FSTimeoutError: no answer in time"),
    ],
)
def test_an_error_is_shown_on_one_line_with_a_reason(error: Exception, shown: str) -> None:
    assert one_line(error) == shown


def test_text_without_credentials_is_unchanged() -> None:
    for text in (
        "s3://bucket/prefix",
        "runs/dcgan-cifar10-0",
        "host:29400",
        "mail me@host.org",
        "tokens 128, passes 3",
        "/data/secret/images",
        "lr=0.001 average=10 images",
        "http://host/a@b",
    ):
        assert redact(text) == text


def test_names_of_credential_variables_are_recognised() -> None:
    assert all(map(is_private_name, ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DB_PASSWORD")))
    assert not any(map(is_private_name, ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK")))


def test_a_setting_with_a_credential_is_rejected_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "classification", "--data-root", "https://me:hunter2@host/data"]) == 2
    output = capsys.readouterr()
    assert "data_root: contains a credential (https://***@host/data)" in output.err
    assert "hunter2" not in output.err + output.out and not list(tmp_path.iterdir())


def test_hiding_credentials_takes_linear_time() -> None:
    """A quadratic-time search would take hours on these texts, and stall training and the board."""
    code = (
        "from paceline.core.text import is_private_name, redact\n"
        "for part in ('a', '-', '://', 'key', '=', 'token', 'a://', 'a.', 'a://b:', 'pass ', 'sk-', '@', 'api_'):\n"
        "    text = part * (100_000 // len(part))\n"
        "    redact(text), is_private_name(text)\n"
        "    assert redact(text + ' token=abc').endswith('token=***')\n"
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_the_mirrored_copy_of_a_log_hides_credentials_that_span_lines(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    lines = ["x" * 70_000, "password:", "hunter2", *["a line"] * 20_000, "https://me:word@host", "no newline"]
    (tmp_path / "logs/rank-0.txt").write_bytes("\n".join(lines).encode() + b"\xff")
    copy = Staging(tmp_path).copy("logs/rank-0.txt")
    assert copy
    text = copy.read_text()
    assert "hunter2" not in text and "word@" not in text
    assert text.splitlines()[3:-2] == ["a line"] * 20_000 and text.endswith(r"no newline\xff")
