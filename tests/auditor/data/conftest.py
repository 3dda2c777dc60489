"""The stores of `tests.stores` for the tests of this folder."""

from tests.stores import proxy, s3, s3_server, web  # noqa: F401, fixtures
