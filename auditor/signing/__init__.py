"""Signatures: keys, authorities and identities, in-toto statements in DSSE envelopes, signed folders (model-signing).

May use: errors.
"""
