"""What a run will take, before it starts: hours, dollars, memory, storage, checkpoints. Arithmetic, without torch."""
