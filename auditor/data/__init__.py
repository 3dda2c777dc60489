"""Image sources: one function opens them all, batches stream, every pass gives the same images in the same order.

May use: errors, progress, subject.
"""
