"""What is said of a run: metrics, callbacks, trackers, progress, reports."""
