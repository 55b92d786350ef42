"""What people see of a run from its directory: its record, its events in words, the live table."""
