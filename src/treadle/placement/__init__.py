"""Processes on a Ray cluster: reserved together, checked, started, monitored. The only layer that imports ray.

Ray starts, places, monitors and transports; the processes' computations are in the layers below, independent of it.
"""
