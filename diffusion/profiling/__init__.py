"""Measure where training time goes: stage timings, device synchronizations, profiler traces, tuning advice."""
