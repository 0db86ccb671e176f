"""The exception for Ctrl-C, which the parser would otherwise turn into an exit code without a message."""


class Interrupted(Exception):
    """Raised when the user presses Ctrl-C during a command; the parser does not intercept this exception."""
