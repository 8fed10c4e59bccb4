"""Optional storage tiers: asynchronous saves also keep recent checkpoints in the nodes' memory or on local disks."""
