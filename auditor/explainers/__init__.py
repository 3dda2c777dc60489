"""The contract of an explainer, and what all kinds share: explanation, artifact, gallery, contributions, export.

May use: errors, progress, pages, subject, network, data, runners, perturbation, attribution, metrics, stability,
kernels/factorization.
"""
