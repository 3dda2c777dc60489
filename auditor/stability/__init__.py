"""Stability from three sides: of one decision, of the whole model by sampling, and by a certified bound.

May use: errors, progress, subject, network, data, attribution, metrics, kernels/networks.
"""
