"""The MLflow registry: resolving versions, loading subjects, attaching explainers, storing audits, logging metrics.

May use: every room of auditor/ but commands.
"""
