"""`python -m introspect_cli`: the command, where it is not on the path."""

from introspect_cli.cli import main

if __name__ == "__main__":
    main()
