"""The parts of launching a job: run directory, plan, resuming, and the run under Ray Train."""
