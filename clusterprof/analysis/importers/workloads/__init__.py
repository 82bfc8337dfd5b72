"""Tracers and logs of workloads: DFTracer, DLIO, MLPerf logs, step times, operator tables."""
