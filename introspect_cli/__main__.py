"""`python -m introspect_cli`: the command, where it is not on the path.

Python would look for modules in the current directory first, and take a `yaml.py` there for the library. The installed
command begins with its own directory, and so does this.
"""

import os
import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120 - pathlib would be imported before the command
    from introspect_cli.cli import main

    main()
