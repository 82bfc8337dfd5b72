"""Rules of others and of thumb, each as an `Answer` to a recording: see `registry`.

The root of the project, whose `tests.support` has the synthetic jobs, and the folder of the lab are
put on the import path here, so that `bench` is all that a caller needs there.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (str(_ROOT), str(_ROOT / "lab")):
    if _folder not in sys.path:
        sys.path.append(_folder)
