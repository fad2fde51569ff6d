"""Processes on a Ray cluster: reserved together, checked, started, watched. The only layer that imports ray.

Ray starts, places, watches and carries; what the processes compute is in the layers below, which know nothing of it.
"""
