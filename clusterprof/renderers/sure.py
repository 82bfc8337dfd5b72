"""How certain a cause is: the number in tables, and in full on what grounds, in words.

98 %                                        in a column
98 %: a marker and a counter agree (class A)    where there is room
"""

from __future__ import annotations

from clusterprof.findings import Finding

_GRADES = {
    "A": "a marker and a counter agree",
    "B": "one direct signal",
    "C": "correlation only",
    "D": "what is usual, nothing seen",
}


def certainty(finding: Finding) -> str:
    """Write how certain a cause is."""
    return f"{100 * finding.confidence_ratio:.0f} %"


def grounds(grade: str) -> str:
    """Say what a class of evidence is, and its letter, under which JSON has it."""
    return f"{_GRADES[grade]} (class {grade})" if grade in _GRADES else f"class {grade}"


def in_full(finding: Finding) -> str:
    """Say how certain a cause is, and on what grounds."""
    return f"{certainty(finding)}: {grounds(finding.grade)}"
