"""Credentials stay out of what is written, mirrored or shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UserError

HIDDEN = "***"
LONGEST_LINE = 500  # characters
_NAMES = (
    r"pass(?:word|wd|phrase)?|secret|token|credentials?|signature|sig"
    r"|(?:api|access|account|private)[_-]?key(?:[_-]?id)?"
)
_IN_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?P<who>[^\s/?#'\"]+)@", re.IGNORECASE)
_NAMED = re.compile(
    rf"(?P<name>[\w-]*(?:{_NAMES})['\"]?\s*(?:=|:)\s*)(?P<quote>['\"]?)(?P<value>[^\s&,;'\"}}\]]+)", re.IGNORECASE
)
_KEYS = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\b(?:gh[pousr]_|hf_|glpat-|sk-)[A-Za-z0-9_-]{16,}")
_PRIVATE_NAME = re.compile(rf"(?:^|[_-])(?:{_NAMES})$", re.IGNORECASE)


def redact(text: str) -> str:
    """The text with what looks like a credential hidden: user:password@ in URLs, token=…, well-known kinds of keys."""
    text = _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _NAMED.sub(rf"\g<name>\g<quote>{HIDDEN}", text)
    return _KEYS.sub(HIDDEN, text)


def has_credentials(text: str) -> bool:
    """Whether `redact` would hide something."""
    return redact(text) != text


def one_line(error: BaseException) -> str:
    """What went wrong, whoever raised it, in one line that holds no credential."""
    return redact(f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_LINE])


def is_private_name(name: str) -> bool:
    """Whether a variable of this name is one that nobody else should see, like AWS_SECRET_ACCESS_KEY."""
    return bool(_PRIVATE_NAME.search(name))


def refuse_credentials(settings: Mapping[str, Any]) -> None:
    """Refuses settings that hold a credential, before they are written anywhere; the message does not repeat it."""
    for name, value in settings.items():
        if isinstance(value, str) and has_credentials(value):
            raise UserError(
                f"{name}: holds a credential ({redact(value)}), and settings are kept with the run; "
                "give it through the environment or the service's own file instead"
            )
