"""Standby processes that take over from the ranks of an ended attempt: an option of a job (`restart.standby`)."""
