"""Non-negative factorization: NMF, coupled NMF and DeepFacto, projections on a basis, and their fast forms.

Knows matrices of activations (channels, positions) and their factors W and S; `coordinate_descent` and `nnls` are what
all others solve with, `projection_simd` is the inner loop of `projection`.

May use: nothing.
"""
