"""State of a run: its id, lock, attempts, status, heartbeat, claims, notifications and stop signals."""
