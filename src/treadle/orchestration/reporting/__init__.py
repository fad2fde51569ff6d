"""What a run reports: metrics, callbacks, trackers, progress, the learning curve."""
