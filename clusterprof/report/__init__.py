"""The result model: all that renderers, gate and exporters may see of an analysis."""
