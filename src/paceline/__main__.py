"""Entry point of `python -m paceline`."""

from paceline.cli.app import main

main()
