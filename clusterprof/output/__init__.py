"""Everything that writes a result: reports for people, exports for programs."""
