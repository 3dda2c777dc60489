"""Decision trees on small integer codes: quantisation, split search by histograms, growing, prediction.

`reference` is the plain truth; `grower` makes the same tree fast: `node_targets` describes the nodes of a level,
`split_search` finds their splits, `tiny_nodes` those of a few rows, `histogram_simd` holds the vector instructions.

May use: nothing.
"""
