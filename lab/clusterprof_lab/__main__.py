"""`python -m clusterprof_lab`."""

import sys

from clusterprof_lab.cli import main

sys.exit(main())
