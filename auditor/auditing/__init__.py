"""An audit: which images, what is measured of the model and of its explainers, and the sealed result.

May use: reliance and what it may use.
"""
