"""Tools for tests: compilation ahead of time, and machine code."""
