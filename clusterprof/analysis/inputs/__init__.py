"""Which inputs are recordings and which are traces of other tools."""
