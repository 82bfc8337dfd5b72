"""The recording on disk: schema, frames, columns; writing, reading, following a live recording."""
