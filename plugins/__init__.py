"""Everything that knows MLflow."""
