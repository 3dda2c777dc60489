"""Studies with people: the design, what participants see, their answers, and the statistics.

A study is drawn and rendered once (`auditor.study.drawing`), sealed as a folder, and needs no model afterwards.
May use: errors, progress, subject, network, data, perturbation, attribution, metrics, stability, explainers.
"""
