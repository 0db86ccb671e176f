"""Images that ship with Paceline, so that a first run needs no download. README.md lists authors and licences."""

from pathlib import Path

FOLDER = Path(__file__).parent
