"""Hot numerics: pure functions on tensors, each with a plain reference beside its fast form.

May use: nothing. The rooms do not import each other.
"""
