"""Profiling of training steps: stage timings, device synchronizations, profiler traces, tuning advice."""
