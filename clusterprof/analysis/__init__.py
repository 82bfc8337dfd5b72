"""The analysis wing: needs a recording only, never the node that wrote it."""
