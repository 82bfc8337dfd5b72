"""`python -m clusterprof`: the same as the command `clusterprof`."""

from __future__ import annotations

import sys

from clusterprof.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
