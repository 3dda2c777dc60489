"""The Audits page inside MLflow's server: reads the registry, verifies files, compares audits.

May use: errors, signing, metrics, explainers, plugins/registry.
"""
