"""Everything that knows BentoML: the explanation service, its types, engine, page and client.

May use: every room of auditor/ but commands, plugins/registry.
"""
