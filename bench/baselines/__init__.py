"""Rules of other tools and rules of thumb, each as an `Answer` to a recording: see `registry`.

This module puts the root of the project (for the synthetic jobs of `tests.support`) and the folder
of the lab on the import path; a caller needs only `bench` there.
"""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
for _folder in (str(_ROOT), str(_ROOT / "lab")):
    if _folder not in sys.path:
        sys.path.append(_folder)
