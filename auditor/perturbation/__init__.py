"""Masks and noise, and what they cost: cells of an image, replacement values, distortion, pixel flipping.

May use: errors, progress, subject, network.
"""
