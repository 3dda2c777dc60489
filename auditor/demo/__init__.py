"""What the demos train on: drawn birds in two versions, one of which learned a camera's stamp, and the digits.

May use: errors, progress, subject, data.
"""

from auditor.demo.digits import DigitsNet, train_digits

__all__ = ["DigitsNet", "train_digits"]
