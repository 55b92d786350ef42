"""A run as its directory shows it: its record, its events in words, the live table."""
