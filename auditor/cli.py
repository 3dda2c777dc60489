"""The `auditor` command."""


def main() -> None:
    """Run the command line."""
