"""stub"""
def doctor() -> None:
    """Print what can be recorded here."""
