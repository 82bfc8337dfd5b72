"""Report formats: terminal, plain, Markdown, JSON, HTML, OpenMetrics, live."""
