"""Closed-form sub-problems of ADMM training and projections on weight constraints.

Every sub-problem is a function of tensors with its minimiser written above it; the network they belong to, and the
order in which they are solved, are the business of auditor/training.

May use: nothing.
"""
