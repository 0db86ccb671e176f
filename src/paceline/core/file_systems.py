"""File systems that fsspec supports, such as S3 and HTTP."""

from __future__ import annotations

from typing import Any

from paceline.core.errors import UserError, install_extra
from paceline.core.secrets import redact

ANSWER_SECONDS = 30.0  # how long an HTTP server may send nothing; s3fs has limits of its own
REQUEST_SECONDS = 3600.0  # for a whole file from a server without range requests
EXTRAS = {"s3": "s3", "s3a": "s3", "http": "http", "https": "http"}  # extra to install for each URL scheme


def _options(url: str) -> dict[str, Any]:
    """Return options for HTTP: no compression, because ranges would refer to compressed bytes, and time limits."""
    if not url.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout

    limits = ClientTimeout(total=REQUEST_SECONDS, sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)
    return {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": {"timeout": limits}}


def open_file_system(url: str, shown: str) -> tuple[Any, str]:
    """Return the fsspec file system and the path for a URL; raise UserError if fsspec does not support it."""
    import fsspec

    if "::" in url:
        raise UserError(f"{redact(shown)}: chained URLs are not supported: use a single URL")
    try:
        found: tuple[Any, str] = fsspec.url_to_fs(url, use_listings_cache=False, **_options(url))
        return found
    except ImportError as error:
        extra = EXTRAS.get(url.partition("://")[0])
        install = install_extra(extra) if extra else str(error)
        raise UserError(f"{redact(shown)}: a package is missing: {install}") from None
    except ValueError as error:
        raise UserError(f"{redact(shown)}: {redact(str(error))}") from None
