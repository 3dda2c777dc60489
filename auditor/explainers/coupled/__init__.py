"""Kind ``coupled``: latent factors shared by pixels, several layers and examples.

May use: explainers and what it may use, kernels/factorization, kernels/networks.
"""
