"""Signatures: keys and who is trusted, in-toto statements in DSSE envelopes, signed folders (OpenSSF model-signing).

May use: errors.
"""
