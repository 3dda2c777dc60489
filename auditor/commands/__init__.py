"""The terminal: one module per command, thin around what the rooms do.

May use: every room.
"""
