"""`python -m clusterprof_lab.score`."""

import sys

from clusterprof_lab.score.run import main

if __name__ == "__main__":
    sys.exit(main())
