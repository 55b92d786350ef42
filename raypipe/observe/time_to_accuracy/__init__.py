"""Views of times to a target accuracy: hybrids beside data parallelism, and global batches."""
