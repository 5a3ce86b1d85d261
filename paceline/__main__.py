"""``python -m paceline`` is the command `paceline`."""

from paceline.cli.main import main

main()
