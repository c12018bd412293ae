"""`python -m swarmnode.cli`."""

from swarmnode.cli import main

main()
