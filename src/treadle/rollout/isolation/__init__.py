"""The one boundary through which a run calls user code: its errors, its time limits, its blocking of the event loop."""
