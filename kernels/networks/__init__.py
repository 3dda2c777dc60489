"""Numerics on networks: operator norms, Jacobian norms, linear CKA, ablation losses, reconstruction losses.

Knows weights, activations and plain functions of tensors; what a model or a layer is, others know.

May use: nothing.
"""
