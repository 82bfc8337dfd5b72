"""From lost time to causes: exact shares, precedence, confidence, what-if replay."""
