"""Rules of others and of thumb, each as an `Answer` to a recording: see `registry`.

The folders of the synthetic jobs and of the lab are put on the import path here, so that `bench`
is all that a caller needs there.
"""

import sys
from pathlib import Path

for _name in ("tests", "lab"):
    _folder = str(Path(__file__).resolve().parents[2] / _name)
    if _folder not in sys.path:
        sys.path.append(_folder)
