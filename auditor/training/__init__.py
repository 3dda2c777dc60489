"""Optimizers other than back-propagation: Block-ADMM, dlADMM, full ADMM, block coordinate descent, and their curves.

May use: errors, progress, subject, data, kernels/admm.
"""
