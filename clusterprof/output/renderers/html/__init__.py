"""The report as one HTML file: assembled here, drawn in the browser by `assets/`."""
