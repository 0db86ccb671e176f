"""Decides what an exception from a storage library means, and describes it in one line."""

from __future__ import annotations

from paceline.core.errors import UserError
from paceline.core.secrets import one_line

CLIENT_ERRORS = range(400, 500)  # HTTP status codes for requests that the server rejects
RETRIED_STATUS = (408, 425, 429)  # client errors that may not recur


def cause_of(error: Exception) -> Exception:
    """Return the exception behind a FileNotFoundError that fsspec raised because an HTTP server did not answer.

    A FileNotFoundError with another cause, such as S3's NoSuchKey, is returned as it is: the file is missing.
    """
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    is_answer = getattr(cause, "status", None) in CLIENT_ERRORS
    is_connection = isinstance(cause, OSError) or type(cause).__module__.partition(".")[0] == "aiohttp"
    return cause if isinstance(cause, Exception) and is_connection and not is_answer else error


def is_lasting(error: Exception) -> bool:
    """Return whether an error will probably recur: a missing file, wrong credentials, or an HTTP client error."""
    status = getattr(error, "status", None)
    if status in CLIENT_ERRORS:
        return status not in RETRIED_STATUS
    return isinstance(error, (FileNotFoundError, PermissionError)) or type(error).__name__ == "NoCredentialsError"


def unreadable(shown: str, error: Exception) -> UserError:
    """Return the message for files that cannot be read; `shown` is their location, without credentials."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, FileNotFoundError):
        what, remedy = "not found", "check that the bucket and the files exist"
    elif isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
        what, remedy = "access denied", "check the credentials in your environment, and the permissions"
    else:
        what, remedy = "cannot be read", "check the URL and the server, then run the same command again to resume"
    return UserError(f"{shown}: {what} ({one_line(error)}); {remedy}")
