"""Advantages, policy losses and reductions: pure functions on flat token arrays.

They are defined on (trajectory, step, token) in canonical order and never see rows or micro-batches.
"""
