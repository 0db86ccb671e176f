"""Images that ship with Paceline, so that a first run downloads nothing; README.md lists authors and licences."""

from pathlib import Path

FOLDER = Path(__file__).parent
