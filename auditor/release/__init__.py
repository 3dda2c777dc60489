"""May it go out: policies, gates, drift between versions, findings, model cards.

May use: auditing and what it may use, kernels/factorization, kernels/networks.
"""
