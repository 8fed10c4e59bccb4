"""HTML reports of training runs: one page of a run, of several runs compared, or of all runs in a folder or bucket."""
