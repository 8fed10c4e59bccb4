"""Recent checkpoints in the memory or on the disks of the nodes: an option of asynchronous saves."""
