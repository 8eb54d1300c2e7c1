"""`python -m instep`."""

from instep.cli.app import main

main()
