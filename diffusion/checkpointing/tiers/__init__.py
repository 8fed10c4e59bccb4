"""Recent checkpoints in memory or on local disks of the nodes: an option for asynchronous saves."""
