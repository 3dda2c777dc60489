"""Kind ``xnn``: explanation heads (sparse reconstruction autoencoders) trained for a class.

May use: explainers and what it may use, kernels/networks.
"""
