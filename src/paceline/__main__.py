"""Entry point for `python -m paceline`."""

from paceline.cli.start import main

main()
