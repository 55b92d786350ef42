"""Rules between the keys of a job."""
