"""Standby processes that take over from the ranks of a failed attempt, an option of jobs (`restart.standby`)."""
