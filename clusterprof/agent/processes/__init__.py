"""The processes of the job and the span rings that they write."""
