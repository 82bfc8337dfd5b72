"""NCCL flight recorder dumps, Inspector logs and text logs."""
