"""HTML reports of training runs: one run, a comparison of runs, or a table of all runs in a folder or bucket."""
