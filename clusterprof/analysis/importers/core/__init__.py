"""What importers share: byte sources, bounded parsing, columns and node tables."""
