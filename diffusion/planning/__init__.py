"""The planner: hours, dollars, memory, storage and checkpoints of a run before it starts, without torch."""
