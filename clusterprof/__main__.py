"""Run the command `clusterprof` as `python -m clusterprof`."""

from __future__ import annotations

import sys

from clusterprof.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
