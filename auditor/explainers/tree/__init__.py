"""Kind ``tree``: decision trees on quantised features, with intersection regularization.

May use: explainers and what it may use, kernels/trees.
"""
