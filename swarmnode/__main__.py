"""`python -m swarmnode`: as the command `swarmnode`, where its folder is not in the PATH."""

from swarmnode.cli import main

main()
