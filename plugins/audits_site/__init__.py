"""The Audits page inside MLflow's server: reads the registry, verifies files, compares audits.

May use: errors, metrics, explainers, plugins/registry.
"""
