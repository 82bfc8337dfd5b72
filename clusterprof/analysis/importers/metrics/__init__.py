"""Time series of monitoring tools: Prometheus, nvidia-smi, rocm-smi, Dynolog, TensorBoard."""
