"""Private names of other libraries, a module per library: which, checked against what version, and what is without."""
