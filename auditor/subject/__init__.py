"""The model under audit: a module with its layers, preprocessing, class names and digest.

May use: errors.
"""
