"""The page that runs a study with people, and its REST routes: no model, no registry, nothing kept of who asks.

May use: errors, study, plugins/audits_site.
"""
