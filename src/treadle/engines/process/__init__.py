"""`ProcessEngine`: the embedded engine in a process of its own, over a socket."""
