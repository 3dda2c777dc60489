"""Runners: where the parts of a long computation run, one after another here or at once on a cluster.

Knows one seam, ``map(work, items) -> results in the order of the items``: the same functions run whoever calls them,
and whoever asked reduces the results in that order. `ray_pool` knows Ray, and nothing else here imports it.

May use: errors, progress, subject, data.
"""
