"""Kind ``nmf``: concepts as directions of one layer, by non-negative factorization.

May use: explainers and what it may use, kernels/factorization.
"""
