"""Numerics on networks: operator norms, Jacobian norms, linear CKA, ablation losses, reconstruction losses.

Knows weights, activations and plain functions of tensors; models and layers are not known here.

May use: nothing.
"""
