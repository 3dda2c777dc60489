"""The network taken apart: its ATen graph, affine maps, the parts below and above a layer, twins with other weights.

May use: errors, progress, subject.
"""
