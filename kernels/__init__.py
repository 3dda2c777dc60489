"""Hot numerics: pure functions on tensors, each with a plain reference beside its fast form."""
