"""Sources of proteins."""
