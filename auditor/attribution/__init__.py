"""Heatmaps by methods: excitation backprop, gradients, Grad-CAM, occlusion; how a map is smoothed and painted.

May use: errors, progress, subject, network, data, perturbation.
"""
