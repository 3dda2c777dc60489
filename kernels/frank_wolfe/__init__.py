"""Frank-Wolfe and its relatives on polytopes: oracles, step sizes, active sets, and projected gradient as the baseline.

Knows smooth functions as objects with a `gradient` and feasible sets by their vertices; every answer carries its gap
as a certificate.

May use: nothing.
"""
