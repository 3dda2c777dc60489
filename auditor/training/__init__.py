"""Optimizers other than back-propagation: Block-ADMM (with factorizations), dlADMM, full ADMM, BCD, and their curves.

May use: errors, progress, subject, data, kernels/admm, kernels/factorization.
"""
