"""Kind ``rde``: rate-distortion relevance maps by Frank-Wolfe.

May use: explainers and what it may use, kernels/frank_wolfe.
"""
