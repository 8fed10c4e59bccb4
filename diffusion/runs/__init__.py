"""State of a run: id, lock, attempts, status, heartbeats, claims on evaluations, notifications and stop signals."""
