"""Files that say what runs, and on what: read, checked before anything starts, changed."""
