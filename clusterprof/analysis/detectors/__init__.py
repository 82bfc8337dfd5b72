"""One cause, one file, one page: each detector claims lost time by its own evidence."""
