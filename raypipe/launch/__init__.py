"""The parts of launching a job: its run directory, its plan, what resuming needs, and the run under Ray Train."""
