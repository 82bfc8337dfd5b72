"""From attributed time to the report: findings, comparisons, impact, coverage, advice."""
