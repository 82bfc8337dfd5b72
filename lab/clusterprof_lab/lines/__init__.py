"""Jobs that lose time in a known line of code, and whether the analysis names it.

The scripts are ordinary training scripts on an emulated accelerator. Each measures with its own
stopwatches how much time passes in the line that is marked with `# guilty`.
"""
