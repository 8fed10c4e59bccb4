"""What a run is: its id, lock, attempts, status, heartbeat, claims, notifications and stop signals."""
