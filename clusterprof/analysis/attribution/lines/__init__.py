"""Which lines of code the lost time passes through."""
