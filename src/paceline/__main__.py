"""`python -m paceline` is `paceline`."""

from paceline.cli.app import main

main()
