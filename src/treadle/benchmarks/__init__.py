"""What `treadle bench` runs: each module measures one thing, side by side in one run, and returns a `Report`."""
