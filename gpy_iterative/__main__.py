"""`python -m gpy_iterative`: see `command_line/`."""

import sys

from gpy_iterative.command_line.commands import main

if __name__ == "__main__":
    sys.exit(main())
