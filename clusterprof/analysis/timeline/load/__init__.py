"""From the records of a folder to chunks, processes and ranks."""
