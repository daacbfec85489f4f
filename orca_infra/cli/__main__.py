"""`python -m orca_infra.cli`, where no console script is installed."""

from orca_infra.cli import main

main()
