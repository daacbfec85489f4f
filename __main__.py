"""The Pulumi program: which stack is this -> its program."""

from orca_infra.stack.base import main

main()
