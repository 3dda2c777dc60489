"""The stores of `tests.stores` for the tests of this folder."""

from tests.stores import s3, s3_server  # noqa: F401, fixtures
