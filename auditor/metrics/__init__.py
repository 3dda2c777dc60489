"""One number, its name and its null: what a metric is called, which direction is better, and how it is computed.

May use: errors, progress, subject, network, data, perturbation, kernels/networks, kernels/factorization.
"""
