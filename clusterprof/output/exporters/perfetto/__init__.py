"""The recording as a Perfetto trace."""
