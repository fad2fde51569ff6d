"""What a run says of itself: metrics, callbacks, trackers, progress, the learning curve."""
