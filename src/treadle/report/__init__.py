"""Reporting of a run: metrics, callbacks, trackers, progress, reports."""
