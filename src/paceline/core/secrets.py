"""Keep credentials out of everything that is saved, mirrored or printed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.core.errors import UserError

HIDDEN = "***"
MAX_LINE_LENGTH = 500  # maximum number of characters in an error message
_NAMES = (
    r"pass(?:word|wd|phrase)?|secret|token|credentials?|signature|sig"
    r"|(?:api|access|account|private)[_-]?key(?:[_-]?id)?"
)
# No pattern starts with a repetition, so matching takes time linear in the length of the text.
_IN_URL = re.compile(r"(?P<scheme>[a-z0-9+.-]://)(?P<who>[^\s/?#'\"]+)@", re.IGNORECASE)
_NAMED = re.compile(
    rf"(?P<name>(?:{_NAMES})['\"]?\s*(?:=|:)\s*)(?P<quote>['\"]?)(?P<value>[^\s&,;'\"}}\]]+)", re.IGNORECASE
)
_KEYS = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:gh[pousr]_|hf_|glpat-|sk-)[A-Za-z0-9_-]{16,}")
_PRIVATE_NAME = re.compile(rf"(?:^|[_-])(?:{_NAMES})$", re.IGNORECASE)


def redact(text: str) -> str:
    """Return text with credentials hidden, such as `user:password@` in URLs, `token=…` and well-known key formats."""
    text = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _NAMED.sub(rf"\g<name>\g<quote>{HIDDEN}", text)
    return _KEYS.sub(HIDDEN, text)


def has_credentials(text: str) -> bool:
    """Return whether a text contains credentials that `redact` would hide."""
    return redact(text) != text


def one_line(error: BaseException) -> str:
    """Return the type and message of an error on one line, without credentials."""
    message = " ".join(str(error).split()) or ("no answer in time" if isinstance(error, TimeoutError) else "")
    return redact(f"{type(error).__name__}: {message}".removesuffix(": ")[:MAX_LINE_LENGTH])


def is_private_name(name: str) -> bool:
    """Return whether a variable name, such as AWS_SECRET_ACCESS_KEY, suggests a credential."""
    return bool(_PRIVATE_NAME.search(name))


def reject_credentials(settings: Mapping[str, object]) -> None:
    """Raise UserError if a setting contains a credential; the message hides it."""
    for name, value in settings.items():
        if isinstance(value, str) and has_credentials(value):
            raise UserError(
                f"{name}: contains a credential ({redact(value)}), but settings are saved with the run; "
                "pass it through an environment variable or the service's own configuration file"
            )
