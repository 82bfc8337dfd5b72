"""Helper processes for vendor libraries that can hang or crash."""
