"""The planner behind `diffusion plan`: estimates hours, dollars, memory, storage and checkpoints without torch."""
