"""Recordings and results for other programs: Perfetto, CSV, Parquet, OTLP, OpenMetrics."""
