"""Kind ``deepfacto``: a factorization trained into the network by Block-ADMM.

May use: explainers and what it may use, training, kernels/factorization.
"""
